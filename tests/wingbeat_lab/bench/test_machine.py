"""What is said of the machine, and of others that share its processors."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from wingbeat_lab.bench import machine


def test_the_stolen_share_is_of_all_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stolen = [100.0], [7.0]
    monkeypatch.setattr(machine.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(machine.psutil, "cpu_times", lambda: SimpleNamespace(steal=stolen[0]))
    monkeypatch.setattr(machine.psutil, "cpu_count", lambda: 4)
    share = machine.StolenShare()
    assert share() == 0.0
    clock[0], stolen[0] = 110.0, 9.0
    assert share() == pytest.approx(2 / 40)
    stolen[0] = 1000.0
    assert share() == 1.0


def test_stolen_seconds_without_kernel_support_are_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.psutil, "cpu_times", SimpleNamespace)
    assert machine.stolen_seconds() == 0.0


def test_machine_description_has_cores_and_memory() -> None:
    about = machine.describe()
    assert about["cores"] >= 1
    assert about["memory_bytes"] > 0
    assert machine.disturbed(about) == ""
