"""What one worker's backward passes show while they are watched: to plan merged layers by it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from wingbeat.engine.gradients.bucket import PendingOperation
from wingbeat.errors import PeerError
from wingbeat.probe.backward import BackwardTimes, combine

FIGURES = 2
"""What a worker tells beside a time for each gradient."""

_LONGEST_S = 1e9


class Passes:
    """Times backward passes: gradient by gradient, up to the last launch, and up to the last sum.

    Args:
        count: how many gradients there are.
        device: where they are.
        goes_on: whether exchanges go on when backward has returned, and tell when they are over.

    Attributes:
        watching: whether passes are timed.
        times: gradient by gradient.
        ends: seconds from the first gradient until all is exchanged, by pass.
    """

    def __init__(self, count: int, device: torch.device, *, goes_on: bool) -> None:
        self._count, self._device = count, device
        self._goes_on = goes_on
        self._began = 0.0
        self.watching = True
        self.ends: list[float] = []
        self._spans: list[float] = []
        self.forget()

    def forget(self) -> None:
        """Begin anew: what was timed says nothing about what follows."""
        self.times = BackwardTimes(self._count, self._device)
        self.ends.clear()
        self._spans.clear()

    def begin(self) -> None:
        """A backward has brought its first gradient."""
        if self.watching:
            self.times.begin()
            self._began = time.perf_counter()

    def enter(self, index: int) -> None:
        """A gradient is ready, and the engine begins to work on it."""
        if self.watching:
            self.times.enter(index)

    def leave(self) -> None:
        """The engine has done with that gradient."""
        if self.watching:
            self.times.leave()

    def end(self) -> None:
        """The last gradient of a backward has come, and is on its way."""
        if self.watching:
            self.times.end()
            if self._began:
                self._spans.append(time.perf_counter() - self._began)

    def launched(self, last: PendingOperation | None) -> None:
        """All exchanges of a backward have been started; ``last`` is that of the last bucket."""
        if self._goes_on and last is not None:
            began, self._began = self._began, 0.0  # the next backward may begin before that
            last.add_done_callback(lambda _handle: self._ended(began))

    def waited(self) -> None:
        """Gradients are as the schedule leaves them when backward returns."""
        if not self._goes_on:
            self._ended(self._began)
            self._began = 0.0

    def _ended(self, began: float) -> None:
        if self.watching and began:
            self.ends.append(time.perf_counter() - began)

    def abandon(self) -> None:
        """A backward was cut short: nothing of it counts."""
        self._began = 0.0
        self.times.begin()

    def own(self, order: Sequence[int], iteration_s: float) -> list[float] | None:
        """Return what this worker has to tell: when each gradient is ready, and `FIGURES` more.

        These are what an iteration of ``iteration_s`` takes outside of backward and exchange, and
        what passes take from the first gradient until all is on its way, encoding included: 0 on
        a device that the host does not wait for. None if there was no pass.
        """
        if not self.times.totals() or not self.ends:
            return None
        rest = max(0.0, iteration_s - statistics.median(self.ends))
        waits = self._device.type == "cpu"
        span = statistics.median(self._spans) if waits and self._spans else 0.0
        return [*self.times.medians(order), rest, span]


def slowest(told: Sequence[Any], count: int, rank: int) -> tuple[tuple[float, ...], float, float]:
    """Return the slowest worker's figures of all that `Passes.own` has returned on each.

    Those who had no pass of their own keep nobody waiting; at least one has to have had one.

    Args:
        told: by rank; as it came from the others.
        count: how many gradients there are.
        rank: this worker's.

    Returns:
        When each gradient is ready; what an iteration takes besides; what passes take.

    Raises:
        PeerError: a row is malformed; names the rank that sent it.
    """
    width = count + FIGURES
    rows: list[Any] = [[0.0] * width if row is None else row for row in told]
    whole = [isinstance(row, list) and len(row) == width for row in rows]
    times = [row[:count] if right else row for row, right in zip(rows, whole, strict=True)]
    ready = combine(times, count, rank)  # names who has sent what is no such row
    figures = [row[count:] if right else row for row, right in zip(rows, whole, strict=True)]
    for peer, values in enumerate(figures):
        for value in values:
            if type(value) not in (int, float) or not 0 <= value < _LONGEST_S:
                raise PeerError(f"rank {rank}: rank {peer} sent {value!r} where a time was due")
        if len(values) != FIGURES:
            raise PeerError(f"rank {rank}: rank {peer} sent {len(values)} times in place of 2")
    rest_s, span_s = (float(max(column)) for column in zip(*figures, strict=True))
    return tuple(ready), rest_s, span_s
