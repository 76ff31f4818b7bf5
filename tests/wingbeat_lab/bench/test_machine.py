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


def test_other_processes_are_told_from_waited_children() -> None:
    """A child that this process has waited for is not another; one that still runs is."""
    burn = "import time; t = time.process_time()\nwhile time.process_time() - t < 1: pass"
    before = machine.others_seconds()
    subprocess.run([sys.executable, "-c", burn], check=True)
    waited = machine.others_seconds() - before
    with subprocess.Popen([sys.executable, "-c", burn + "\ninput()"], stdin=subprocess.PIPE) as one:
        before = machine.others_seconds()
        deadline = time.monotonic() + 60
        while sum(psutil.Process(one.pid).cpu_times()[:2]) < 0.9 and time.monotonic() < deadline:
            time.sleep(0.05)
        running = machine.others_seconds() - before
        one.communicate(b"\n")
    assert running > 0.8
    assert waited < running


def test_stolen_seconds_without_kernel_support_are_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.psutil, "cpu_times", SimpleNamespace)
    assert machine.stolen_seconds() == 0.0


def test_machine_description_has_cores_and_memory() -> None:
    about = machine.describe()
    assert about["cores"] >= 1
    assert about["memory_bytes"] > 0
    assert machine.disturbed(about) == []
