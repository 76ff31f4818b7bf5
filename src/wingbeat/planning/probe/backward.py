"""When each gradient is ready, with nothing but backward counted (OMGS-SGD, Eqs. 2 and 7).

Only the time between the engine's own pieces of work counts: from where it has done with one
gradient to where autograd hands it the next. On a GPU these are events on the current stream, and
nobody waits for the device before the figures are read.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from wingbeat.errors import PeerError

STRAGGLER = 1.5
"""An iteration that takes more than this multiple of the median says nothing about the model."""

_LONGEST_S = 1e6
"""No backward takes longer: what a peer sends beyond it is no measurement."""


@dataclass(frozen=True, slots=True)
class _Iteration:
    """Which slots' gradients came, in order, and the backward before each in seconds."""

    order: tuple[int, ...]
    increments: tuple[float, ...]

    @property
    def total(self) -> float:
        return math.fsum(self.increments)

    def ready(self, count: int) -> list[float]:
        """Return the ready time of every slot; one without a gradient is ready at the end."""
        times = [self.total] * count
        now = 0.0
        for slot, increment in zip(self.order, self.increments, strict=True):
            now += increment
            times[slot] = now
        return times


class BackwardTimes:
    """Measures one model's backward, gradient by gradient, over some iterations.

    In each backward: `begin`, then `enter` and `leave` around what the engine does with each
    gradient, then `end`. What backward did before the first gradient cannot be told from forward
    and the engine's own preparations, so the first one is ready at 0.

    Args:
        count: number of slots; their indices are below it.
        device: where the gradients are.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._count = count
        self._cuda = device.type == "cuda"
        self._order: list[int] = []
        self._marks: list[Any] = []
        self._open = False
        self._spare: list[Any] = []
        self._finished: deque[tuple[list[int], list[Any]]] = deque()
        self._iterations: list[_Iteration] = []
        self._taken = 0

    # -- called in backward ---------------------------------------------------------------

    def begin(self) -> None:
        """A backward has brought its first gradient; forget one that was cut short."""
        self._spare.extend(self._marks if self._cuda else ())
        self._order, self._marks = [], []
        self._open = True

    def enter(self, index: int) -> None:
        """The gradient of slot ``index`` is ready: the engine begins its own work."""
        if self._open:
            self._marks.append(self._mark() if self._cuda else time.perf_counter())
            self._order.append(index)

    def leave(self) -> None:
        """The engine's own work for this gradient is done: backward goes on."""
        if self._open:
            self._marks.append(self._mark() if self._cuda else time.perf_counter())

    def end(self) -> None:
        """The backward is over; without any gradient, or cut short in a hook, it does not count."""
        self._open = False
        if self._order and len(self._marks) == 2 * len(self._order):
            self._finished.append((self._order, self._marks))
            self._order, self._marks = [], []

    # -- called between iterations --------------------------------------------------------

    def take(self) -> list[float]:
        """Return the next iteration's seconds of backward before each gradient, in ready order.

        Each iteration is returned once. Empty if there is no other, or the device has not done
        it yet; this does not wait.
        """
        self._read(wait=False)
        if self._taken == len(self._iterations):
            return []
        self._taken += 1
        return list(self._iterations[self._taken - 1].increments)

    def totals(self) -> list[float]:
        """Return the seconds from the first to the last gradient, for each iteration so far.

        Waits for the device, as `order` and `medians` do.
        """
        self._read(wait=True)
        return [iteration.total for iteration in self._iterations]

    def order(self) -> list[int]:
        """Return the slots, first ready first; equal ones as in the latest iteration."""
        latest = {slot: place for place, slot in enumerate(self._usual()[-1].order)}
        times = self._ready()
        return sorted(range(self._count), key=lambda i: (times[i], latest.get(i, self._count), i))

    def medians(self, order: Sequence[int] | None = None) -> list[float]:
        """Return when each gradient is ready, in seconds, nondecreasing, first ready first.

        Medians over all iterations; those that took more than 1.5 times as long as the median
        are left out. At least one iteration has to have ended.

        Args:
            order: the slots in the order that all workers go by; default: as seen here. Who has
                to wait for an earlier one of it is ready no sooner than that one.
        """
        times = self._ready()
        ready, latest = [], 0.0
        for slot in self.order() if order is None else order:
            latest = max(latest, times[slot])
            ready.append(latest)
        return ready

    def _ready(self) -> list[float]:
        rows = [iteration.ready(self._count) for iteration in self._usual()]
        return [statistics.median(column) for column in zip(*rows, strict=True)]

    def _usual(self) -> list[_Iteration]:
        longest = STRAGGLER * statistics.median(self.totals())
        return [each for each in self._iterations if each.total <= longest]

    # -- marks ----------------------------------------------------------------------------

    def _mark(self) -> Any:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _read(self, *, wait: bool) -> None:
        """Turn finished iterations' marks into seconds, as far as the device has got."""
        while self._finished:
            order, marks = self._finished[0]
            if self._cuda and not marks[-1].query():
                if not wait:
                    return
                marks[-1].synchronize()
            self._finished.popleft()
            gaps = zip(marks[1:-1:2], marks[2::2], strict=True)
            increments = (0.0, *(self._between(left, entered) for left, entered in gaps))
            self._iterations.append(_Iteration(tuple(order), increments))
            self._spare.extend(marks if self._cuda else ())

    def _between(self, left: Any, entered: Any) -> float:
        seconds = left.elapsed_time(entered) / 1e3 if self._cuda else entered - left
        return max(0.0, float(seconds))


def combine(rows: Sequence[Any], count: int, rank: int) -> list[float]:
    """Return when each gradient is ready on the slowest worker, which all others wait for.

    Args:
        rows: by rank, what each worker's `BackwardTimes.medians` returned for the order that all
            go by; as it came from the others.
        count: how many figures belong into a row.
        rank: this worker's, for messages.

    Raises:
        PeerError: a row is no list of ``count`` finite numbers that never fall, from 0 on; names
            the rank that sent it.
    """
    for peer, row in enumerate(rows):
        if not _right(row, count):
            shown = str(row)[:60]
            raise PeerError(
                f"rank {rank}: rank {peer} sent malformed backward times: {shown}; they have to "
                f"be {count} numbers of seconds that never fall; all workers have to run the same "
                "model and wingbeat"
            )
    return [float(max(column)) for column in zip(*rows, strict=True)]


def _right(row: Any, count: int) -> bool:
    if not isinstance(row, (list, tuple)) or len(row) != count:
        return False
    before = 0.0
    for value in row:
        # Written so that NaN fails as well.
        if type(value) not in (int, float) or not before <= value <= _LONGEST_S:
            return False
        before = value
    return True
