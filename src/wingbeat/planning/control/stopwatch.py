"""How long iterations take, without ever waiting for a device."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch


class Stopwatch:
    """Measures the time from one `lap` to the next.

    The host runs ahead of a GPU, so there a lap is the time between two events of the current
    stream, and is known some laps later.
    """

    def __init__(self, device: torch.device) -> None:
        self._marks: deque[Any] = deque()
        self._cuda = device.type == "cuda"
        self._seconds = 0.0

    def lap(self) -> float:
        """Begin the next lap; return the seconds of the latest one that is known, 0.0 if none."""
        self._marks.append(self._mark())
        while len(self._marks) > 1 and self._passed(self._marks[1]):
            begin = self._marks.popleft()
            self._seconds = self._between(begin, self._marks[0])
        return self._seconds

    def restart(self) -> None:
        """Forget the laps before this moment, also those that a device has not finished."""
        while len(self._marks) > 1:
            self._marks.popleft()
        self._seconds = 0.0

    def _mark(self) -> Any:
        if not self._cuda:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _passed(self, mark: Any) -> bool:
        return bool(mark.query()) if self._cuda else True

    def _between(self, begin: Any, end: Any) -> float:
        seconds = begin.elapsed_time(end) / 1e3 if self._cuda else end - begin
        return float(seconds)
