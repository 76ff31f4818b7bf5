"""A server's arithmetic: sums of slices over all workers, in the same order every time. Pure.

A slice is added as it arrives, but for one thing: workers are added in the order of their ranks, so
that the same gradients give the same bits in every run. What comes before its turn waits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from wingbeat.servers.dtypes import ITEMSIZE, Array, add, narrowed, sum_dtype, widened

Free = Callable[[], bool]
"""Whether nobody reads a buffer any more."""


class Refused(Exception):
    """A worker has sent what cannot be right; says what."""


@dataclass(slots=True)
class Total:
    """One slice's sum.

    Attributes:
        dtype: what it travels in.
        numel: its elements.
        round: which sum it is: how many there were before.
        added: how many workers' gradients are in it, in the order of their ranks.
        waiting: what has come before its turn, by worker.
        since: when the first of this round came, in seconds.
        buffer: what is summed in.
        result: the complete sum as it travels; None while it is not complete.
        readers: for each buffer but the present one, who may still read it.
    """

    dtype: str
    numel: int
    round: int = -1
    added: int = 0
    waiting: dict[int, memoryview] = field(default_factory=dict)
    since: float = 0.0
    buffer: Array | None = None
    result: Array | None = None
    readers: list[Free] = field(default_factory=list)
    spare: list[tuple[Array, list[Free]]] = field(default_factory=list)


class Sums:
    """All sums of one server.

    Args:
        workers: how many push each slice.
        most: bytes that all sums together may take; a job that needs more is refused.
    """

    def __init__(self, workers: int, most: int) -> None:
        self._workers = workers
        self._most = most
        self._totals: dict[tuple[int, int], Total] = {}
        self._plan = -1
        self.nbytes = 0

    def push(
        self,
        worker: int,
        key: tuple[int, int],
        number: int,
        dtype: str,
        payload: memoryview,
        now: float = 0.0,
    ) -> Total | None:
        """Add a worker's gradients of a slice; return the sum if they were the last.

        Args:
            worker: its rank.
            key: plan and slice.
            number: the round.
            dtype: of the payload.
            payload: kept, if it comes before its turn, until it is added.
            now: seconds.

        Raises:
            Refused: it does not fit what has come before, or is pushed twice.
        """
        total = self._total(worker, key, dtype, payload)
        if number == total.round + 1 and (total.result is not None or total.round < 0):
            self._begin(total, number, now)
        if number != total.round or total.result is not None:
            raise Refused(
                f"rank {worker} pushed slice {key[1]} of round {number} in round {total.round}"
            )
        if worker < total.added or worker in total.waiting:
            raise Refused(f"rank {worker} pushed slice {key[1]} of round {number} twice")
        total.waiting[worker] = payload
        while (due := total.waiting.pop(total.added, None)) is not None:
            self._add(total, due)
        if total.added < self._workers:
            return None
        assert total.buffer is not None
        total.result = narrowed(total.buffer, dtype)
        return total

    def finished(self, key: tuple[int, int], number: int) -> Total | None:
        """Return the sum of that round if it is complete.

        Raises:
            Refused: that round is over, or is not the next.
        """
        total = self._totals.get(key)
        current = -1 if total is None else total.round
        if number not in (current, current + 1):
            raise Refused(f"slice {key[1]} of round {number} was pulled in round {current}")
        return (
            total if total is not None and number == current and total.result is not None else None
        )

    def missing(self, before: float) -> tuple[tuple[int, int], set[int]] | None:
        """Return a slice that was begun before that moment, and the workers that it waits for."""
        for key, total in self._totals.items():
            if total.round >= 0 and total.result is None and total.since < before:
                there = {*range(total.added), *total.waiting}
                return key, set(range(self._workers)) - there
        return None

    def lacking(self, worker: int) -> bool:
        """Whether a sum that has begun waits for that worker."""
        return any(
            t.round >= 0 and t.result is None and worker >= t.added and worker not in t.waiting
            for t in self._totals.values()
        )

    def _total(self, worker: int, key: tuple[int, int], dtype: str, payload: memoryview) -> Total:
        if dtype not in ITEMSIZE:
            raise Refused(
                f"rank {worker} pushed {dtype or 'nothing'}; allowed: {', '.join(ITEMSIZE)}"
            )
        numel, rest = divmod(len(payload), ITEMSIZE[dtype])
        if rest or not numel:
            raise Refused(f"rank {worker} pushed {len(payload)} bytes, which is no {dtype}")
        if key[0] > self._plan:
            self._plan = key[0]
            self._drop_older()
        total = self._totals.get(key)
        if total is None:
            if key[0] < self._plan:
                raise Refused(f"rank {worker} pushed a slice of plan {key[0]} after {self._plan}")
            total = self._totals[key] = Total(dtype, numel)
        if (dtype, numel) != (total.dtype, total.numel):
            raise Refused(
                f"rank {worker} pushed {numel} {dtype} of slice {key[1]}, which has "
                f"{total.numel} {total.dtype}"
            )
        return total

    def _begin(self, total: Total, number: int, now: float) -> None:
        """Start a round, in a buffer that nobody reads any more."""
        if total.buffer is not None:
            total.spare.append((total.buffer, total.readers))
        total.round, total.added, total.since = number, 0, now
        total.waiting, total.result, total.readers = {}, None, []
        for index, (buffer, readers) in enumerate(total.spare):
            if all(free() for free in readers):
                total.buffer = buffer
                del total.spare[index]
                return
        dtype = sum_dtype(total.dtype)
        need = total.numel * dtype.itemsize
        if self.nbytes + need > self._most:
            raise Refused(
                f"sums would take {self.nbytes + need} bytes; the server has room for {self._most}"
            )
        self.nbytes += need
        total.buffer = np.empty(total.numel, dtype)

    def _add(self, total: Total, payload: memoryview) -> None:
        assert total.buffer is not None
        if total.added == 0:
            np.copyto(total.buffer, widened(payload, total.dtype))
        else:
            add(total.buffer, payload, total.dtype)
        total.added += 1

    def _drop_older(self) -> None:
        """Forget the complete sums of plans before; whoever still sends one keeps its memory."""
        done = [k for k, t in self._totals.items() if k[0] < self._plan and t.result is not None]
        for key in done:
            total = self._totals.pop(key)
            buffers = len(total.spare) + (total.buffer is not None)
            self.nbytes -= buffers * total.numel * sum_dtype(total.dtype).itemsize
