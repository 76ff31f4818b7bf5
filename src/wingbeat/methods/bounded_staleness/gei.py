"""The gradient exchange index: which contributions are in the parameters (Canary, section 5.2).

The index has a row of k integers for each iteration that any worker has entered; bit i of an
integer is set when all pieces of worker i's colayer have arrived. The paper sets a bit as pieces
arrive. Here a worker sets its own bits when it sends, because they decide whether its iteration is
dropped, and the others' bits when a round is applied: a piece that has arrived may be summed again
if its owner dies, and the index would otherwise differ between workers.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol


class Part(Protocol):
    """The fields of a `PieceSum` that the index reads."""

    @property
    def colayer(self) -> int: ...  # noqa: D102

    @property
    def piece(self) -> int: ...  # noqa: D102

    @property
    def entries(self) -> tuple[tuple[int, int], ...]: ...  # noqa: D102

    @property
    def earliest(self) -> tuple[int, ...]: ...  # noqa: D102


class Gei:
    """The matrix Q of one worker.

    Attributes:
        retired: number of complete rows that were removed.
        zeta: the last row, the iteration of the fastest worker; -1 before the first.
        counted: number of contributions of all workers in the parameters, counted by piece.
        history: retired rows, oldest first.
    """

    def __init__(self, workers: int, colayers: int, *, keep_history: bool = False) -> None:
        self.workers, self._colayers, self._keep_history = workers, colayers, keep_history
        self.retired = self.counted = 0
        self.history: list[tuple[int, ...]] = []
        self._pieces: dict[int, list[list[int]]] = {}  # by row, colayer and piece: mask of workers
        self._own: dict[int, int] = {}  # by row: mask of sent colayers
        self.zeta = -1

    def enter(self, zeta: int) -> None:
        """Add the rows up to this iteration, which a worker has entered."""
        self.zeta = max(self.zeta, zeta)

    def mark_sent(self, iteration: int, colayer: int) -> None:
        """Set this worker's own bit: all pieces of the colayer were sent."""
        self.enter(iteration)
        self._own[iteration] = self._own.get(iteration, 0) | 1 << colayer

    def exchanged(self, iteration: int) -> int:
        """Return p_i: the number of colayers of which this worker has sent its pieces."""
        return self._own.get(iteration, 0).bit_count()

    def row(self, iteration: int, own: int | None = None) -> tuple[int, ...]:
        """Return the row vector r of a row that has not been retired.

        The sent colayers of worker ``own`` count too; with None, only applied ones count.
        """
        pieces = self._pieces.get(iteration)
        out = [0] * self._colayers
        for colayer in range(self._colayers):
            if pieces is not None:
                out[colayer] = functools.reduce(operator.and_, pieces[colayer])
            if own is not None and self._own.get(iteration, 0) >> colayer & 1:
                out[colayer] |= 1 << own
        return tuple(out)

    def apply_round(self, round_parts: Iterable[Part]) -> None:
        """Count the contributions of a round, given all of its parts, and retire complete rows.

        A row is complete when the bit of each worker is set or the worker is past this iteration.
        The round contains both facts, so all workers retire rows at the same round.
        """
        parts = tuple(round_parts)
        for part in parts:
            self.counted += len(part.entries)
            for iteration, worker in part.entries:
                self.enter(iteration)
                self._row(iteration)[part.colayer][part.piece] |= 1 << worker
        while self.retired <= self.zeta and self._is_complete(self.retired, parts):
            if self._keep_history:
                self.history.append(self.row(self.retired))
            self._pieces.pop(self.retired, None)
            self._own.pop(self.retired, None)
            self.retired += 1

    def _is_complete(self, iteration: int, parts: tuple[Part, ...]) -> bool:
        for part in parts:
            mask = self._row(iteration)[part.colayer][part.piece]
            for worker, earliest in enumerate(part.earliest):
                if 0 <= earliest <= iteration and not mask >> worker & 1:
                    return False
        return True

    def _row(self, iteration: int) -> list[list[int]]:
        if iteration not in self._pieces:
            self._pieces[iteration] = [[0] * self.workers for _ in range(self._colayers)]
        return self._pieces[iteration]

    def copy_applied(self) -> Gei:
        """Return a copy without this worker's own bits, for a worker that pulls parameters."""
        out = copy.deepcopy(self)
        out._own = {}
        return out

    def adopt(self, other: Gei) -> None:
        """Continue from the matrix of the worker whose parameters were pulled; keep own bits."""
        self.retired, self.history = other.retired, list(other.history)
        self.counted = other.counted
        self._pieces = copy.deepcopy(other._pieces)
        self._own = {i: mask for i, mask in self._own.items() if i >= self.retired}
        self.enter(other.zeta)

    def with_colayers(self, colayers: int, first: int) -> Gei:
        """Return the matrix with which training continues with a different number of colayers.

        Rows before ``first`` are complete. ``counted`` is scaled in proportion and rounded.
        """
        out = Gei(self.workers, colayers, keep_history=self._keep_history)
        out.counted = round(self.counted * colayers / self._colayers)
        if self._keep_history:
            out.history = [*self.history, *(self.row(i) for i in range(self.retired, first))]
        out.retired = first
        out.enter(first)
        return out

    @property
    def rows(self) -> Mapping[int, Sequence[Sequence[int]]]:
        """By iteration, colayer and piece: a mask of the workers whose pieces were applied."""
        return self._pieces

    @classmethod
    def from_rows(
        cls,
        workers: int,
        colayers: int,
        retired: int,
        zeta: int,
        counted: int,
        rows: Mapping[int, Sequence[Sequence[int]]],
    ) -> Gei:
        """Make a matrix from its ``rows`` and attributes, without a history."""
        out = cls(workers, colayers)
        out.retired, out.zeta, out.counted = retired, zeta, counted
        out._pieces = {i: [list(row) for row in table] for i, table in rows.items()}
        return out
