"""What is said of the machine, and of others that share its processors."""

from __future__ import annotations

import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from wingbeat_lab.bench import machine


def test_disturbances_are_shares_of_all_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stolen, busy, own = [100.0], [7.0], [50.0], [3.0]
    monkeypatch.setattr(machine.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(
        machine.psutil, "cpu_times",
        lambda: SimpleNamespace(steal=stolen[0], user=busy[0], nice=1.0, system=1.0),
    )  # fmt: skip
    monkeypatch.setattr(machine.psutil, "cpu_count", lambda: 4)
    monkeypatch.setattr(machine.os, "times", lambda: (own[0], 1.0, 1.0, 1.0, clock[0]))
    shares = machine.Disturbances()
    assert shares() == {"stolen_share": 0.0, "others_share": 0.0}
    clock[0], stolen[0], busy[0], own[0] = 110.0, 9.0, 75.0, 20.0
    assert shares() == {
        "stolen_share": pytest.approx(2 / 40),
        "others_share": pytest.approx(8 / 40),
    }
    stolen[0] = 1000.0
    assert shares()["stolen_share"] == 1.0


def test_waited_children_are_no_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a child that has run for a second; those of other tests run beside it."""
    still = psutil.cpu_times()
    monkeypatch.setattr(machine.psutil, "cpu_times", lambda: still)
    burn = "import time\nwhile time.process_time() < 1: pass\ninput()"
    with subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE) as child:
        before = machine.others_seconds()
        deadline = time.monotonic() + 60
        while sum(psutil.Process(child.pid).cpu_times()[:2]) < 0.95 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert before - machine.others_seconds() < 0.5, "it runs, and counts as another"
        child.communicate(b"\n")
    assert before - machine.others_seconds() > 0.9


def test_stolen_seconds_without_kernel_support_are_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.psutil, "cpu_times", SimpleNamespace)
    assert machine.stolen_seconds() == 0.0


def test_machine_description_has_cores_and_memory() -> None:
    about = machine.describe()
    assert about["cores"] >= 1
    assert about["memory_bytes"] > 0
    assert machine.disturbed(about) == []
