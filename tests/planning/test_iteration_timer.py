"""Laps on the host are known at once; on a device when it has got there."""

from __future__ import annotations

import time

import pytest
import torch

from wingbeat.planning import control
from wingbeat.planning.control import IterationTimer


def test_iteration_timer_on_host_knows_last_lap(monkeypatch: pytest.MonkeyPatch) -> None:
    stamps = iter([10.0, 12.5, 13.0])
    monkeypatch.setattr(control, "time", _Clock(lambda: next(stamps)))
    watch = IterationTimer(torch.device("cpu"))
    assert [watch.lap() for _ in range(3)] == [0.0, 2.5, 0.5]


def test_iteration_timer_on_device_knows_lap_after_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    device = _Device()
    device.install(monkeypatch)
    watch = IterationTimer(torch.device("cuda"))
    laps = []
    for reached in (0, 0, 1, 3, 4):
        device.reached = reached
        laps.append(watch.lap())
    # Event n is passed once the device has reached n; events lie n * n milliseconds apart.
    assert laps == [0.0, 0.0, 0.001, 0.005, 0.007]


def test_iteration_timer_restart_discards_earlier_laps(monkeypatch: pytest.MonkeyPatch) -> None:
    device = _Device()
    device.install(monkeypatch)
    watch = IterationTimer(torch.device("cuda"))
    for _ in range(4):
        watch.lap()
    watch.restart()
    device.reached = 3
    assert watch.lap() == 0.0
    device.reached = 4
    assert watch.lap() == pytest.approx(0.007)


def test_iteration_timer_restart_discards_known_lap(monkeypatch: pytest.MonkeyPatch) -> None:
    device = _Device()
    device.install(monkeypatch)
    watch = IterationTimer(torch.device("cuda"))
    device.reached = 1
    assert [watch.lap() for _ in range(3)] == [0.0, 0.001, 0.001]
    watch.restart()
    assert watch.lap() == 0.0


@pytest.mark.gpu
def test_iteration_timer_on_real_device_measures() -> None:
    watch = IterationTimer(torch.device("cuda"))
    for _ in range(3):
        watch.lap()
        torch.cuda._sleep(20_000_000)
    torch.cuda.synchronize()
    assert watch.lap() > 0.001


class _Clock:
    def __init__(self, now: object) -> None:
        self.monotonic = now


class _Device:
    """Stands for a GPU that gets somewhere later than the host."""

    def __init__(self) -> None:
        self.reached = 0
        self.made = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have torch make this device's events."""
        monkeypatch.setattr(torch, "Event", self.event)
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: device)

    def event(self, device: torch.device, *, enable_timing: bool) -> _Event:
        assert enable_timing
        self.made += 1
        return _Event(self, self.made - 1)


class _Event:
    def __init__(self, device: _Device, number: int) -> None:
        self._device, self.number = device, number
        self._recorded = 0.0

    def record(self, stream: torch.device) -> None:
        assert stream == torch.device("cuda")
        self._recorded = time.monotonic()

    def query(self) -> bool:
        return self._device.reached >= self.number

    def elapsed_time(self, end: _Event) -> float:
        assert self._recorded <= end._recorded
        return float(end.number**2 - self.number**2)
