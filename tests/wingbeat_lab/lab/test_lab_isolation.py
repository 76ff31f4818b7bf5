"""Nothing stays behind, however a lab ends, and no root is needed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import wingbeat
from wingbeat_lab import lab

SOURCE = str(Path(wingbeat.__file__).parents[1])
LOOPBACK_OR_LAB = ["loopback:2", pytest.param("star:2@1gbit", marks=pytest.mark.lab)]
LAUNCH = f"""if True:
    import signal, sys
    # Whoever is started in the background by a script inherits that Ctrl-C is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path.insert(0, {SOURCE!r})
    from wingbeat_lab import lab
    script = "(setsid sleep 600 &) ; echo up; exec sleep 600"
    lab.run(sys.argv[1], ["sh", "-c", script])
"""
DEADLINE = 15.0


def wait_until(true: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + DEADLINE
    while not true():
        assert time.monotonic() < end, f"not within {DEADLINE} s: {what}"
        time.sleep(0.02)


def descendants(pid: int) -> set[int]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found, todo = set(), [pid]
    while todo:
        for child in children.get(todo.pop(), []):
            found.add(child)
            todo.append(child)
    return found


def network_of(pid: int | str) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/net")
    return ""


@pytest.fixture
def launcher(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """A process that runs a lab, once both workers are up."""
    command = [sys.executable, "-c", LAUNCH, request.param]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert sorted([process.stdout.readline(), process.stdout.readline()]) == [
            "[h0] up\n",
            "[h1] up\n",
        ]
        yield process
    finally:
        process.kill()
        process.stdout.close()
        process.wait()


def our_labs(pid: int) -> list[str]:
    return [found.name for found in lab.running() if found.name.startswith(f"{pid}-")]


def assert_gone(pids: set[int], networks: set[str], launcher_pid: int) -> None:
    wait_until(
        lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), f"processes {pids} ended"
    )
    everywhere = {network_of(p.name) for p in Path("/proc").glob("[0-9]*")}
    assert not networks & everywhere
    assert our_labs(launcher_pid) == []


@pytest.mark.parametrize("launcher", LOOPBACK_OR_LAB, indirect=True)
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_killed_launcher_leaves_no_process(
    launcher: subprocess.Popen[str], number: signal.Signals, request: pytest.FixtureRequest
) -> None:
    shaped = "star" in request.node.callspec.params["launcher"]
    mounts, interfaces = Path("/proc/self/mounts").read_text(), set(lab.counters.read())
    pids = descendants(launcher.pid)
    networks = {network_of(pid) for pid in pids} - {network_of("self"), ""}
    assert len(pids) >= 5  # the lab, two workers, and what each left in the background
    assert len(networks) == (3 if shaped else 0)  # two hosts and the switch
    assert len(our_labs(launcher.pid)) == 1

    launcher.send_signal(number)
    launcher.wait(DEADLINE)

    assert_gone(pids, networks, launcher.pid)
    assert Path("/proc/self/mounts").read_text() == mounts
    assert set(lab.counters.read()) == interfaces


@pytest.mark.parametrize("launcher", LOOPBACK_OR_LAB, indirect=True)
def test_running_lab_counters_show_its_traffic(
    launcher: subprocess.Popen[str], request: pytest.FixtureRequest
) -> None:
    (name,) = our_labs(launcher.pid)
    reading = lab.stats(name)
    shaped = "star" in request.node.callspec.params["launcher"]
    assert list(reading.hosts) == (["h0", "h1"] if shaped else ["localhost"])
    (found,) = [found for found in lab.running() if found.name == name]
    assert found.command[:2] == ("sh", "-c")


WITHOUT_RIGHTS = (
    # Another user, where that user may run this Python; else the same files with no capabilities.
    ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"],
    ["unshare", "--user", "--map-user=1000", "--map-group=1000"],
)
CHECK = f"""if True:
    import os, re, sys
    status = open("/proc/self/status").read()
    assert os.geteuid() != 0 and re.search("CapEff:\\t0+\\n", status)
    assert os.access(sys.executable, os.X_OK) and os.access({__file__!r}, os.R_OK)
"""


def without_root() -> list[str]:
    """What to put before a command to run it without root's rights."""
    if os.geteuid() != 0:
        return []
    for prefix in WITHOUT_RIGHTS:
        if shutil.which(prefix[0]) is None:
            continue
        tried = subprocess.run(
            [*prefix, sys.executable, "-c", CHECK], capture_output=True, check=False
        )
        if tried.returncode == 0:
            return prefix
    pytest.skip("this root cannot give up its rights: no setpriv, and no user namespaces")


@pytest.mark.lab
def test_lab_without_root_privileges_has_hosts_and_names() -> None:
    code = f"""if True:
        import json, os, sys
        sys.path.insert(0, {SOURCE!r})
        from wingbeat_lab import lab
        assert os.geteuid() != 0
        lines = {{}}
        read = "from socket import *; print(gethostname(), gethostbyname('h0'))"
        result = lab.run("star:2@1gbit,prio=2", [sys.executable, "-S", "-c", read],
                         on_line=lambda rank, line: lines.setdefault(rank, line), timeout=30)
        print(json.dumps([lab.available(), result.exit_code, lines]))
    """
    command = [*without_root(), sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [None, 0, {"0": "h0 10.0.0.1", "1": "h1 10.0.0.1"}]
