"""A server's arithmetic: sums of slices over all workers, in the same order every time. Pure.

A slice is added as it arrives, but for one thing: workers are added in the order of their ranks, so
that the same gradients give the same bits in every run. What comes before its turn waits, and it is
said when it is added: meanwhile its sender can be kept from sending more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from wingbeat.methods.parameter_server.dtypes import ITEMSIZE, Array, add, narrowed, sum_dtype

Free = Callable[[], bool]
"""Whether nobody reads a buffer any more."""

Added = Callable[[], object]
"""Is called when a payload was added, or at least its turn has come."""

HELD = 16 << 20
"""Bytes of gradients, over all slices, that are kept where they have arrived until the next ones
are there, to be added together: so a sum goes through memory half as often."""

EACH = 1024
"""Bytes that keeping a slice takes beside its sums: slices of no size are no way to more memory."""


class Refused(Exception):
    """A worker has sent what cannot be right; says what."""


@dataclass(eq=False, slots=True)
class Sum:
    """A complete sum of one slice.

    Attributes:
        round: how many sums of the slice there were before.
        dtype: what it travels in.
        result: as it travels; stays as it is until all readers are done.
        readers: who may still read it.
        asked: the workers that it was sent to, or will be.
    """

    round: int
    dtype: str
    result: Array
    readers: list[Free] = field(default_factory=list)
    asked: set[int] = field(default_factory=set)

    def free(self) -> bool:
        """Whether all that read it are done."""
        return all(reader() for reader in self.readers)


@dataclass(slots=True)
class Total:
    """One slice: the sum that is being made, and those that were.

    Attributes:
        dtype: what it travels in.
        numel: its elements.
        round: which sum it is: how many there were before.
        added: how many workers' gradients are in it, in the order of their ranks.
        waiting: what has come before its turn, by worker.
        held: the last worker's of those, if it waits to be added with the next.
        since: when the first of this round came, in seconds.
        buffer: what is summed in; None when the sum is complete.
        spare: the same of the sum before, if that travels in another dtype: nobody reads it.
        out: memory for the sum in that dtype, of an earlier one that nobody reads.
        sums: complete ones whose memory is kept, the last one at the end.
        nbytes: of all of these.
    """

    dtype: str
    numel: int
    round: int = -1
    added: int = 0
    waiting: dict[int, tuple[memoryview, Added]] = field(default_factory=dict)
    held: list[memoryview] = field(default_factory=list)
    since: float = 0.0
    buffer: Array | None = None
    spare: Array | None = None
    out: Array | None = None
    sums: list[Sum] = field(default_factory=list)
    nbytes: int = 0


class Sums:
    """All sums of one server.

    Args:
        workers: how many push each slice.
        most: bytes that all sums together may take; a job that needs more is refused.
        held: bytes of all that may wait to be added with the next worker's.
        dense: whether sums go back in the dtype that they were made in.

    Attributes:
        nbytes: of the sums that are kept or being made.
    """

    def __init__(self, workers: int, most: int, held: int = HELD, *, dense: bool = False) -> None:
        self._workers = workers
        self._dense = dense
        self._most, self._most_held = most, held
        self._totals: dict[tuple[int, int], Total] = {}
        self._plan = -1
        self._held = 0
        self.nbytes = 0

    def push(
        self,
        worker: int,
        key: tuple[int, int],
        number: int,
        dtype: str,
        payload: memoryview,
        now: float = 0.0,
        added: Added = lambda: None,
    ) -> Sum | None:
        """Add a worker's gradients of a slice; return the sum if they were the last.

        Args:
            worker: its rank.
            key: plan and slice.
            number: the round.
            dtype: of the payload.
            payload: kept, if it comes before its turn, until it is added.
            now: seconds.
            added: called as soon as that is so.

        Raises:
            Refused: it does not fit what has come before, or is pushed twice. Nothing has changed.
        """
        total = self._total(worker, key, dtype, payload)
        if total.buffer is None and number == total.round + 1:
            self._begin(total, now)
            self._totals[key] = total
        elif total.buffer is None or number != total.round:
            raise Refused(
                f"rank {worker} pushed slice {key[1]} of round {number} in round {total.round}"
            )
        elif worker < total.added or worker in total.waiting:
            raise Refused(f"rank {worker} pushed slice {key[1]} of round {number} twice")
        total.waiting[worker] = payload, added
        self._add_due(total)
        if total.added < self._workers:
            return None
        return self._complete(key, total)

    def finished(self, key: tuple[int, int], number: int) -> Sum | None:
        """Return the sum of that round if it is complete.

        It can be asked for until the next one is: a worker may be late with its pull while others
        push for the next round already.

        Raises:
            Refused: that round is over, or is not the next; or the plan is over.
        """
        if key[0] < self._plan:
            raise Refused(f"slice {key[1]} of plan {key[0]} was pulled after plan {self._plan}")
        total = self._totals.get(key)
        last = total.sums[-1].round if total is not None and total.sums else -1
        if number not in (last, last + 1):
            raise Refused(f"slice {key[1]} of round {number} was pulled after round {last}")
        return total.sums[-1] if total is not None and number == last else None

    def take(self, key: tuple[int, int]) -> Array | None:  # noqa: ARG002
        """Return what the sums of a slice still lack: nothing, as they are sent as they are."""
        return None

    def missing(self, before: float) -> tuple[tuple[int, int], set[int]] | None:
        """Return a slice that was begun before that moment, and the workers that it waits for.

        Those that are ahead with another slice are left out: they may push no more until the others
        follow.
        """
        for key, total in self._totals.items():
            if total.buffer is not None and total.since < before:
                there = {*range(total.added), *total.waiting}
                late = set(range(self._workers)) - there
                return key, late - self._ahead() or late
        return None

    def _ahead(self) -> set[int]:
        return {worker for total in self._totals.values() for worker in total.waiting}

    def awaits(self, worker: int) -> bool:
        """Whether that worker has pushed to a sum that has begun, and waits for the others'."""
        return any(
            t.buffer is not None and (worker < t.added or worker in t.waiting)
            for t in self._totals.values()
        )

    def lacking(self, worker: int) -> bool:
        """Whether a sum that has begun waits for that worker."""
        return any(
            t.buffer is not None and worker >= t.added and worker not in t.waiting
            for t in self._totals.values()
        )

    def _total(self, worker: int, key: tuple[int, int], dtype: str, payload: memoryview) -> Total:
        numel = elements(worker, dtype, payload)
        total = self._totals.get(key)
        if total is None:
            self._refuse_old(worker, key)
            total = Total(dtype, numel)
        if (dtype, numel) != (total.dtype, total.numel):
            raise Refused(
                f"rank {worker} pushed {numel} {dtype} of slice {key[1]}, which has "
                f"{total.numel} {total.dtype}"
            )
        return total

    def _refuse_old(self, worker: int, key: tuple[int, int]) -> None:
        if key[0] < self._plan:
            raise Refused(f"rank {worker} pushed a slice of plan {key[0]} after {self._plan}")

    def _begin(self, total: Total, now: float) -> None:
        """Start a round, in memory that nobody reads any more, and not in the last sum's."""
        over = next((old for old in total.sums[:-1] if old.free()), None)
        dtype = sum_dtype(total.dtype)
        back = ITEMSIZE[self._back_in(total.dtype)]
        narrow = back < dtype.itemsize
        need = 0 if over is not None else total.numel * back
        if narrow and total.spare is None:
            need += total.numel * dtype.itemsize
        if need:
            self._reserve(total, need)
        if over is not None:
            total.sums.remove(over)
        total.out = over.result if over is not None else None
        total.buffer = total.spare if narrow else total.out
        if total.buffer is None:
            total.buffer = np.empty(total.numel, dtype)
        total.spare = None
        total.round, total.added, total.since = total.round + 1, 0, now

    def _reserve(self, total: Total, need: int) -> None:
        would = self.nbytes + need
        if would + EACH * len(self._totals) > self._most:
            raise Refused(
                f"{len(self._totals)} sums would take {would} bytes, and {EACH} each besides; the "
                f"server has room for {self._most}"
            )
        self.nbytes = would
        total.nbytes += need

    def _add_due(self, total: Total) -> None:
        """Add those whose turn it is, one rank after the other, and say so."""
        due: list[tuple[memoryview, Added]] = []
        while (found := total.waiting.pop(total.added + len(due), None)) is not None:
            due.append(found)
        if due:
            self._add(total, [each for each, _ in due])
        for _, told in due:
            told()

    def _complete(self, key: tuple[int, int], total: Total) -> Sum:
        assert total.buffer is not None
        done = self._made(total)
        if done.result is not total.buffer:
            total.spare = total.buffer
        total.sums.append(done)
        total.buffer = total.out = None
        if key[0] > self._plan:
            self._drop_before(key[0])
        return done

    def _add(self, total: Total, payloads: list[memoryview]) -> None:
        assert total.buffer is not None
        held = [*total.held, *payloads]
        self._held -= sum(map(len, total.held))
        total.added, total.held = total.added + len(payloads), []
        last = total.added == self._workers
        if len(held) == 1 and not last and self._held + len(held[0]) <= self._most_held:
            total.held = held
            self._held += len(held[0])
        else:
            add(total.buffer, held, total.dtype, begin=total.added == len(held))

    def _drop_before(self, plan: int) -> None:
        """Forget older plans, as every worker has pushed for this one: it wants no older sum."""
        self._plan = plan
        for key in [key for key in self._totals if key[0] < plan]:
            total = self._totals.pop(key)
            self.nbytes -= total.nbytes
            self._held -= sum(map(len, total.held))

    def _made(self, total: Total) -> Sum:
        """Return what is complete, as it is to travel."""
        assert total.buffer is not None
        dtype = self._back_in(total.dtype)
        return Sum(total.round, dtype, narrowed(total.buffer, dtype, total.out))

    def _back_in(self, dtype: str) -> str:
        """Return what a sum of ``dtype`` travels in."""
        return sum_dtype(dtype).name if self._dense else dtype


def elements(worker: int, dtype: str, payload: memoryview) -> int:
    """Return how many elements a payload has.

    Raises:
        Refused: it has no elements of that dtype.
    """
    if dtype not in ITEMSIZE:
        raise Refused(f"rank {worker} pushed {dtype or 'nothing'}; allowed: {', '.join(ITEMSIZE)}")
    numel, rest = divmod(len(payload), ITEMSIZE[dtype])
    if rest or not numel:
        raise Refused(f"rank {worker} pushed {len(payload)} bytes, which is no {dtype}")
    return numel
