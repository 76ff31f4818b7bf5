"""The profile of backward: when each gradient is ready, and when exchanges start and complete.

Only backward itself counts (OMGS-SGD, Eqs. 2 and 7): the time from the end of the engine's work on
one gradient until autograd delivers the next. On a GPU these are events on the current stream, and
nothing waits for the device before the times are read.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from wingbeat.engine.gradients.bucket import PendingOperation
from wingbeat.errors import PeerError

STRAGGLER = 1.5
"""An iteration that takes more than this multiple of the median is an outlier."""

_EXTRA_FIGURES = 2
"""Columns of a worker's row in addition to a time for each gradient."""

_LONGEST_S = 1e6


class BackwardProfiler:
    """Profiles backward passes: each gradient, the last launch, and the last completed exchange.

    The order of calls in each backward is `begin`; `enter` and `leave` around the engine's work on
    each gradient; `end`, `launched` and `waited`. Backward time before the first gradient cannot be
    separated from forward, so the first gradient is ready at 0. ``asynchronous`` exchanges continue
    after backward; ``ends`` holds the seconds from the first gradient until all is exchanged, by
    pass.
    """

    def __init__(self, count: int, device: torch.device, *, asynchronous: bool) -> None:
        self._count, self._device = count, device
        self._on_device = device.type != "cpu"
        self._asynchronous = asynchronous
        self.enabled = True
        self._spare: list[Any] = []
        self.reset()

    def reset(self) -> None:
        """Discard all measurements."""
        self._began, self._open = 0.0, False
        self._order: list[int] = []
        self._marks: list[Any] = []
        self._finished: list[tuple[list[int], list[Any]]] = []
        # Slots of the gradients in order, and the backward time before each in seconds.
        self._iterations: list[tuple[tuple[int, ...], tuple[float, ...]]] = []
        self._spans: list[float] = []
        self.ends: list[float] = []

    def begin(self) -> None:
        """Start a backward at its first gradient; discard an interrupted one."""
        if self.enabled:
            self.abandon()
            self._open = True
            self._began = time.perf_counter()

    def enter(self, index: int) -> None:
        """Record that the gradient of a slot is ready and the engine's work on it begins."""
        if self._open:
            self._marks.append(self._mark())
            self._order.append(index)

    def leave(self) -> None:
        """Record that the engine's work on that gradient has ended."""
        if self._open:
            self._marks.append(self._mark())

    def end(self) -> None:
        """Record that the last gradient was launched; discard an empty or interrupted backward."""
        self._open = False
        if self._order and len(self._marks) == 2 * len(self._order):
            self._finished.append((self._order, self._marks))
            self._order, self._marks = [], []
        if self.enabled and self._began:
            self._spans.append(time.perf_counter() - self._began)

    def launched(self, last: PendingOperation | None) -> None:
        """Record that all exchanges were started; ``last`` is that of the last bucket."""
        if self._asynchronous and last is not None:
            began, self._began = self._began, 0.0  # the next backward may begin before it ends
            last.add_done_callback(lambda _handle: self._exchanged(began))

    def waited(self) -> None:
        """Record that the schedule has finished with the gradients."""
        if not self._asynchronous:
            self._exchanged(self._began)
            self._began = 0.0

    def _exchanged(self, began: float) -> None:
        if self.enabled and began:
            self.ends.append(time.perf_counter() - began)

    def abandon(self) -> None:
        """Discard a backward that was interrupted."""
        self._spare.extend(self._marks if self._on_device else ())
        self._order, self._marks = [], []
        self._began, self._open = 0.0, False

    def totals(self) -> list[float]:
        """Return the seconds from first to last gradient by iteration; wait for the device."""
        for order, marks in self._finished:
            if self._on_device:
                marks[-1].synchronize()
            gaps = zip(marks[1:-1:2], marks[2::2], strict=True)
            increments = (0.0, *(self._between(left, entered) for left, entered in gaps))
            self._iterations.append((tuple(order), increments))
            self._spare.extend(marks if self._on_device else ())
        self._finished.clear()
        return [math.fsum(increments) for _, increments in self._iterations]

    def order(self) -> list[int]:
        """Return the slots, first ready first; ties as in the latest iteration."""
        latest = {slot: place for place, slot in enumerate(self._typical()[-1][0])}
        times = self._ready()
        return sorted(range(self._count), key=lambda i: (times[i], latest.get(i, self._count), i))

    def medians(self, order: Sequence[int] | None = None) -> list[float]:
        """Return the ready times in ``order``, not falling: medians in seconds without outliers."""
        times = self._ready()
        order = self.order() if order is None else order
        return list(itertools.accumulate((times[slot] for slot in order), max))

    def summary(self, order: Sequence[int], iteration_s: float) -> list[float] | None:
        """Return the ready time of each gradient in seconds, and two more figures.

        These are the seconds of an iteration outside of backward and exchange, and the seconds of
        passes from the first gradient until the last launch, encoding included; the latter is 0 on
        a GPU, for which the host does not wait. None if there was no pass.
        """
        if not self.totals() or not self.ends:
            return None
        rest = max(0.0, iteration_s - statistics.median(self.ends))
        synchronous = self._device.type == "cpu"
        span = statistics.median(self._spans) if synchronous and self._spans else 0.0
        return [*self.medians(order), rest, span]

    def _ready(self) -> list[float]:
        """Return the median ready time of each slot; one without a gradient is ready at the end."""
        rows = []
        for order, increments in self._typical():
            row = [math.fsum(increments)] * self._count
            for slot, now in zip(order, itertools.accumulate(increments), strict=True):
                row[slot] = now
            rows.append(row)
        return [statistics.median(column) for column in zip(*rows, strict=True)]

    def _typical(self) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
        totals = self.totals()
        longest = STRAGGLER * statistics.median(totals)
        pairs = zip(self._iterations, totals, strict=True)
        return [each for each, total in pairs if total <= longest]

    def _mark(self) -> Any:
        if not self._on_device:
            return time.perf_counter()
        event = self._spare.pop() if self._spare else torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def _between(self, left: Any, entered: Any) -> float:
        seconds = left.elapsed_time(entered) / 1e3 if self._on_device else entered - left
        return max(0.0, float(seconds))


def combine(
    rows: Sequence[Any], count: int, rank: int, ranks: Sequence[int]
) -> tuple[tuple[float, ...], float, float]:
    """Return the figures of the slowest worker, for which all wait; `PeerError` if malformed.

    ``ranks`` has the rank in the job of each worker, as used in error messages.
    """
    width = count + _EXTRA_FIGURES
    whole: list[Any] = [[0.0] * width if row is None else row for row in rows]
    for peer, row in enumerate(whole):
        if not _valid(row, count):
            raise PeerError(
                f"rank {ranks[rank]}: rank {ranks[peer]} sent malformed backward times: "
                f"{str(row)[:60]}; allowed are {count} numbers of seconds that never fall, and "
                f"{_EXTRA_FIGURES} more; all workers have to run the same model and wingbeat"
            )
    *ready, rest_s, span_s = (float(max(column)) for column in zip(*whole, strict=True))
    return tuple(ready), rest_s, span_s


def _valid(row: Any, count: int) -> bool:
    if not isinstance(row, (list, tuple)) or len(row) != count + _EXTRA_FIGURES:
        return False
    # Written so that NaN fails too.
    seconds = all(type(value) in (int, float) and 0 <= value <= _LONGEST_S for value in row)
    return seconds and list(row[:count]) == sorted(row[:count])
