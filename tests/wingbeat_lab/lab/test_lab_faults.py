"""Scripted faults: what the workers see, and when."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wingbeat.errors import LabError, UsageError
from wingbeat_lab import lab

WAIT = """if True:
    import os, subprocess, sys, time
    if os.environ["RANK"] == "1":
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        time.sleep(600)
    time.sleep(1)
    print("still here")
"""

# Samples the carrier and prints each change; ends after three states.
CARRIER = """if True:
    import pathlib, time
    state, seen = pathlib.Path("/sys/class/net/eth1/carrier"), []
    end = time.monotonic() + 20
    while len(seen) < 3 and time.monotonic() < end:
        now = state.read_text().strip()
        if [now] != seen[-1:]:
            seen.append(now)
        time.sleep(0.01)
    print(*seen)
"""


@pytest.mark.parametrize(
    "spec", ["loopback:2", pytest.param("star:2@1gbit", marks=pytest.mark.lab)]
)
def test_kill_ends_one_hosts_processes(spec: str, run_python: Callable[..., Any]) -> None:
    events: list[str] = []
    ran = run_python(spec, WAIT, fail="300ms kill h1", on_event=events.append)
    assert ran.result.exit_codes == (0, 128 + signal.SIGKILL)
    assert ran.result.first_failure.host == "h1"
    assert 0.3 <= ran.result.first_failure.after < 5
    assert ran.lines[0] == ["still here"]
    assert events == ["0.3s kill h1"]


def test_kill_of_one_local_worker_leaves_the_others(run_lab: Callable[..., Any]) -> None:
    ran = run_lab("loopback:1", ["sleep", "1"], per_host=2, fail="100ms kill h0.1")
    assert ran.result.exit_codes == (0, 128 + signal.SIGKILL)


@pytest.mark.lab
@pytest.mark.alone
def test_a_cut_cable_is_seen_by_its_host_alone_and_can_be_mended(
    run_python: Callable[..., Any],
) -> None:
    code = f"import os\nif os.environ['RANK'] == '1':\n    exec({CARRIER!r})"
    ran = run_python("star:2x2@1gbit", code, fail="500ms h1.eth1 down; 1s h1.eth1 up")
    assert ran.lines[1] == ["1 0 1"]
    other = run_python("star:2x2@1gbit", CARRIER.replace("20", "1.2"), fail="500ms h1.eth0 down")
    assert other.lines[1] == ["1"]


@pytest.mark.lab
@pytest.mark.alone
def test_traffic_stops_while_cut_and_goes_on_after(measure: Callable[..., Any]) -> None:
    flows, faults = [[0, 1, "10.0.0.2", 0]], "400ms h1 down; 1s h1 up"
    (rate,) = measure("star:2@100mbit", flows, seconds=1.5, fail=faults).rates
    assert rate < 0.75 * 1e8  # the flow ended well, which ``measure`` asserts


@pytest.mark.lab
@pytest.mark.alone
@pytest.mark.parametrize("prio", [0, 2])
def test_changed_rate_holds_both_ways(prio: int, measure: Callable[..., Any]) -> None:
    flows = [[0, 1, "10.0.0.2", 0], [1, 0, "10.0.0.1", 0]]
    spec, faster = f"star:2@20mbit,prio={prio}", "0s rate h1 200mbit; 0s rate h0 200mbit"
    assert min(measure(spec, flows, fail=faster).rates) > 0.8 * 2e8
    spec, slower = f"star:2@200mbit,prio={prio}", "0s rate h1.eth0 20mbit"
    assert max(measure(spec, flows, fail=slower).rates) < 1.3 * 2e7


@pytest.mark.parametrize(
    "spec", ["loopback:2", pytest.param("star:2@1gbit", marks=pytest.mark.lab)]
)
def test_injected_fault_occurs_in_the_running_lab(
    spec: str, run_lab: Callable[..., Any], tmp_path: Path
) -> None:
    faults, events, errors = lab.FaultInjector(), [], []

    def on_event(text: str) -> None:
        events.append(text)

    def kill_when_started() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        try:
            faults.inject("h1 sideways")
        except UsageError as error:
            errors.append(str(error))
        faults.inject("kill h1")

    killer = threading.Thread(target=kill_when_started, daemon=True)
    killer.start()
    command = ["sh", "-c", f"touch {tmp_path}/$RANK; test $RANK = 0 || exec sleep 60"]
    ran = run_lab(spec, command, faults=faults, on_event=on_event)
    killer.join()
    assert ran.result.exit_codes == (0, 128 + signal.SIGKILL)
    assert events == ["0s kill h1"]
    assert "'sideways'" in errors[0]
    with pytest.raises(LabError, match="does not run"):
        faults.inject("kill h0")
