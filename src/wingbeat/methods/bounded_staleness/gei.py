"""The gradient exchange index: which contributions are in the parameters (Canary, section 5.2).

A row for each iteration from when any worker has entered it, k integers each; bit i of an
integer says that all pieces of worker i's colayer have arrived. The paper sets a bit as pieces
arrive. Here a worker's own bits are set as it sends, as they decide about dropping, and the others'
as a round is applied: what has arrived may be summed anew if its owner dies, and so would say
something different on each worker.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol


class Part(Protocol):
    """One piece of a round, as far as the index reads it; see `messages.Round`."""

    @property
    def colayer(self) -> int: ...  # noqa: D102

    @property
    def piece(self) -> int: ...  # noqa: D102

    @property
    def entries(self) -> tuple[tuple[int, int], ...]: ...  # noqa: D102

    @property
    def first(self) -> tuple[int, ...]: ...  # noqa: D102


class Gei:
    """The matrix Q of one worker.

    Attributes:
        workers: how many there may be.
        retired: rows before this one are complete and gone; each had the integers in ``history``
            if these are kept.
        counted: contributions that are in the parameters, of all workers, one for each piece of
            each colayer of an iteration.
        history: rows that were retired, oldest first; empty unless they are to be kept.
    """

    def __init__(self, workers: int, colayers: int, *, keep: bool = False) -> None:
        self.workers, self._colayers, self._keep = workers, colayers, keep
        self.retired = self.counted = 0
        self.history: list[tuple[int, ...]] = []
        self._pieces: dict[int, list[list[int]]] = {}  # row: colayer: piece: mask of workers
        self._own: dict[int, int] = {}  # row: mask of colayers that were sent
        self._zeta = -1

    @property
    def zeta(self) -> int:
        """Last row: the fastest worker's iteration; -1 before the first."""
        return self._zeta

    def enter(self, zeta: int) -> None:
        """Make rows up to this iteration, as somebody has entered it."""
        self._zeta = max(self._zeta, zeta)

    def sent(self, iteration: int, colayer: int) -> None:
        """Set this worker's own bit: all pieces of the colayer were sent."""
        self.enter(iteration)
        self._own[iteration] = self._own.get(iteration, 0) | 1 << colayer

    def exchanged(self, iteration: int) -> int:
        """Return p_i: of how many colayers this worker's own pieces were sent."""
        return self._own.get(iteration, 0).bit_count()

    def row(self, iteration: int, own: int | None = None) -> tuple[int, ...]:
        """Return the row vector r of an iteration that has not been retired.

        Args:
            iteration: the row.
            own: the worker whose sent colayers count already; None for what was applied alone.
        """
        pieces = self._pieces.get(iteration)
        out = [0] * self._colayers
        for colayer in range(self._colayers):
            if pieces is not None:
                out[colayer] = _all(pieces[colayer])
            if own is not None and self._own.get(iteration, 0) >> colayer & 1:
                out[colayer] |= 1 << own
        return tuple(out)

    def apply(self, rounds: Iterable[Part]) -> None:
        """Count what the pieces of one round, all of them, have brought.

        Rows are retired that nothing can be added to any more: of each worker either the bit is
        there or it is past them, which is what the rounds say. So they are equal everywhere.
        """
        rounds = tuple(rounds)
        for part in rounds:
            self.counted += len(part.entries)
            for iteration, worker in part.entries:
                self.enter(iteration)
                self._of(iteration)[part.colayer][part.piece] |= 1 << worker
        while self.retired <= self._zeta and self._closed(self.retired, rounds):
            if self._keep:
                self.history.append(self.row(self.retired))
            self._pieces.pop(self.retired, None)
            self._own.pop(self.retired, None)
            self.retired += 1

    def _closed(self, iteration: int, rounds: tuple[Part, ...]) -> bool:
        for part in rounds:
            have = self._of(iteration)[part.colayer][part.piece]
            for worker, first in enumerate(part.first):
                if 0 <= first <= iteration and not have >> worker & 1:
                    return False
        return True

    def _of(self, iteration: int) -> list[list[int]]:
        if iteration not in self._pieces:
            self._pieces[iteration] = [[0] * self.workers for _ in range(self._colayers)]
        return self._pieces[iteration]

    def applied(self) -> Gei:
        """Return a copy of what all workers have in common, for one that pulls parameters."""
        out = copy.deepcopy(self)
        out._own = {}
        return out

    def adopt(self, other: Gei) -> None:
        """Go on from another worker's matrix, as its parameters were pulled; own bits stay."""
        self.retired, self.history = other.retired, list(other.history)
        self.counted = other.counted
        self._pieces = copy.deepcopy(other._pieces)
        self._own = {i: mask for i, mask in self._own.items() if i >= self.retired}
        self.enter(other.zeta)

    def rebundled(self, colayers: int, first: int) -> Gei:
        """Return the matrix that training goes on with in other colayers.

        Args:
            colayers: their number.
            first: the first row; all before are complete. What they ``counted`` is in proportion
                to the number, rounded.
        """
        out = Gei(self.workers, colayers, keep=self._keep)
        out.counted = round(self.counted * colayers / self._colayers)
        if self._keep:
            out.history = [*self.history, *(self.row(i) for i in range(self.retired, first))]
        out.retired = first
        out.enter(first)
        return out

    @property
    def rows(self) -> Mapping[int, Sequence[Sequence[int]]]:
        """By iteration, colayer and piece: whose pieces have arrived, a bit for each worker."""
        return self._pieces

    @classmethod
    def of(
        cls,
        workers: int,
        colayers: int,
        retired: int,
        zeta: int,
        counted: int,
        rows: Mapping[int, Sequence[Sequence[int]]],
    ) -> Gei:
        """Make a matrix with these ``rows``, and without a history.

        Args:
            workers: how many there may be.
            colayers: k.
            retired: rows that are complete and gone.
            zeta: the last row.
            counted: contributions that are in the parameters.
            rows: as `rows`.
        """
        out = cls(workers, colayers)
        out.retired, out._zeta, out.counted = retired, zeta, counted
        out._pieces = {i: [list(row) for row in table] for i, table in rows.items()}
        return out


def _all(masks: Iterable[int]) -> int:
    """Return the workers that are in all masks."""
    out = -1
    for mask in masks:
        out &= mask
    return out
