"""Rounds: contributions are kept, summed by the owner of a piece, applied in order, and indexed.

Only the owner of a piece decides which contributions a round has (Canary, section 4.4.2). So every
worker adds the same sums in the same order, and all replicas hold the same bits.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from wingbeat.methods.bounded_staleness.messages import Contribution, GeiState, PieceSum, Watermarks

Table = list[list[list[int]]]


class ReceivedRounds:
    """The rounds that a worker has received and not applied.

    A round is complete when all pieces of all colayers have arrived. It is applied as a whole, so
    any optimizer makes one step per round on the same gradients on every worker.

    ``applied`` rounds are in the parameters, ``complete`` ones complete or applied. If earlier
    rounds can no longer be received, pulled parameters must have ``pull_target`` rounds; None if no
    parameters are needed, or while some first rounds are unknown.
    """

    def __init__(self, workers: int, colayers: int, first: int = 0) -> None:
        self._workers, self._colayers = workers, colayers
        self.complete = self.applied = first
        self.pull_target: int | None = None
        self._frozen = False
        self._watermarks = [[[-1] * workers for _ in range(colayers)] for _ in range(workers)]
        self._next: list[list[int] | None] = [[first] * colayers for _ in range(workers)]
        self._received: dict[int, dict[tuple[int, int], PieceSum]] = {}

    def clear_expected(self) -> None:
        """Expect no rounds until `expect`; a joining worker receives first rounds in Welcome."""
        self._next = [None] * self._workers

    def expect(self, piece: int, first_rounds: Sequence[int]) -> None:
        """Expect the rounds of a piece from ``first_rounds`` on, one number per colayer."""
        self._next[piece] = list(first_rounds)
        self._update_pull_target()

    def is_next(self, part: PieceSum) -> bool:
        """Whether ``part`` is the next round of its piece and colayer."""
        numbers = self._next[part.piece]
        return numbers is not None and numbers[part.colayer] == part.number

    def freeze(self, frozen: bool) -> None:
        """Complete no rounds while frozen: in a view change they must be those of the proposal."""
        self._frozen = frozen
        self._update_complete()

    def add_sum(self, part: PieceSum) -> None:
        """Add a part that `is_next`; skip it if pulled parameters already contain it."""
        numbers = self._next[part.piece]
        assert numbers is not None
        numbers[part.colayer] += 1
        if part.number >= self.applied:
            self._received.setdefault(part.number, {})[part.colayer, part.piece] = part
        self._update_complete()

    def _update_complete(self) -> None:
        whole = self._workers * self._colayers
        while not self._frozen and len(self._received.get(self.complete, ())) == whole:
            self.complete += 1

    def restart_piece(self, piece: int, number: int) -> None:
        """Discard the rounds of a piece from ``number`` on, which its new owner sums again."""
        # All earlier rounds are complete on some worker, and no later one has been applied here.
        self._next[piece] = [number] * self._colayers
        for later in (n for n in self._received if n >= number):
            for colayer in range(self._colayers):
                self._received[later].pop((colayer, piece), None)
        self.complete = max(min(self.complete, number), self.applied)
        self._update_pull_target()

    def _update_pull_target(self) -> None:
        """Compute the first round from which all parts have arrived or can still arrive."""
        self.pull_target = None
        if not self.knows_first_rounds:
            return
        first = self.applied
        for piece, numbers in enumerate(self._next):
            for colayer, number in enumerate(numbers or ()):
                while number > first and (colayer, piece) in self._received.get(number - 1, ()):
                    number -= 1
                first = max(first, number)
        if first > self.applied:
            self.pull_target = first

    @property
    def knows_first_rounds(self) -> bool:
        """Whether the first round of every piece is known."""
        return None not in self._next

    @property
    def buffered(self) -> int:
        """Number of buffered rounds, complete or not."""
        return len(self._received)

    def take_round(self) -> tuple[PieceSum, ...] | None:
        """Return the parts of the next complete round by colayer and piece; count it as applied."""
        if self.applied == self.complete:
            return None
        parts = self._received.pop(self.applied)
        self.applied += 1
        _update_watermarks(self._watermarks, parts.values())
        return tuple(parts[key] for key in sorted(parts))

    def skip_to(self, applied: int, watermarks: Sequence[Watermarks]) -> None:
        """Continue from pulled parameters with ``applied`` rounds and these watermarks."""
        self._discard_before(applied)
        self.applied = applied
        self.complete = max(self.complete, applied)
        self._watermarks = [[list(row) for row in piece] for piece in watermarks]
        self._update_complete()
        self._update_pull_target()

    def drop_before(self, end: int) -> None:
        """Discard the rounds before ``end``: parameters that contain them will be pulled."""
        self._discard_before(end)
        self.complete = self.applied
        self._update_pull_target()

    def _discard_before(self, end: int) -> None:
        self._received = {n: parts for n, parts in self._received.items() if n >= end}

    def last_fully_applied(self, colayer: int, worker: int) -> int:
        """Return the last iteration of a worker of which all pieces are in the parameters."""
        return min(piece[colayer][worker] for piece in self._watermarks)

    def last_partly_applied(self, worker: int) -> int:
        """Return the last iteration of a worker of which any piece is in the parameters."""
        return max(row[worker] for piece in self._watermarks for row in piece)

    def watermarks(self, *, complete: bool) -> tuple[Watermarks, ...]:
        """Return the watermarks of the applied rounds, or also of the ``complete`` ones."""
        table: Table = [[list(row) for row in piece] for piece in self._watermarks]
        if complete:
            for number in range(self.applied, self.complete):
                _update_watermarks(table, self._received[number].values())
        return tuple(tuple(tuple(row) for row in piece) for piece in table)


def _update_watermarks(watermarks: Table, parts: Iterable[PieceSum]) -> None:
    for part in parts:
        row = watermarks[part.piece][part.colayer]
        for iteration, worker in part.entries:
            row[worker] = max(row[worker], iteration)


class OwnedPiece:
    """Collects the contributions to one piece of all colayers, and decides what a round has.

    A round closes when each worker has sent its contribution to it, or has reported that it has
    none. A later contribution joins a later round. ``next_rounds`` has by colayer the round that
    closes next.
    """

    def __init__(self, workers: int, colayers: int, first: int) -> None:
        self.next_rounds = [first] * colayers
        self._pending: list[dict[Contribution, Any]] = [{} for _ in range(colayers)]
        self._sent_through = [[-1] * workers for _ in range(colayers)]
        self._changed = set(range(colayers))  # colayers that may be ready to close
        self._members: tuple[int, ...] = ()

    def add_contribution(self, worker: int, iteration: int, colayer: int, payload: Any) -> None:
        """Add a contribution, which is also the worker's answer for the round of its iteration."""
        self._pending[colayer][iteration, worker] = payload
        self._mark(colayer, worker, iteration)

    def mark_sent_through(self, worker: int, number: int) -> None:
        """Record that the worker has sent everything for the rounds up to ``number``."""
        for colayer in range(len(self.next_rounds)):
            self._mark(colayer, worker, number)

    def _mark(self, colayer: int, worker: int, number: int) -> None:
        sent = self._sent_through[colayer]
        if number > sent[worker]:
            sent[worker] = number
            self._changed.add(colayer)

    def remove_worker(self, worker: int) -> None:
        """Discard the pending contributions and answers of a worker that died."""
        for pending, sent in zip(self._pending, self._sent_through, strict=True):
            for entry in [entry for entry in pending if entry[1] == worker]:
                del pending[entry]
            sent[worker] = -1

    def earliest_pending(self, colayer: int, worker: int, iteration: int) -> int:
        """Return the first iteration of a worker, now at ``iteration``, that may be summed."""
        pending = (entry[0] for entry in self._pending[colayer] if entry[1] == worker)
        return min(pending, default=iteration)

    def close_rounds(
        self, members: tuple[int, ...]
    ) -> Iterator[tuple[int, int, dict[Contribution, Any]]]:
        """Yield colayer, number and contributions of each round that can close now.

        Contributions are sorted by iteration, then by worker, so equal contributions give equal
        bits, and all those of one iteration give the synchronous sum. A contribution of an
        iteration later than the round waits for its own round.
        """
        if members != self._members:
            self._members = members
            self._changed.update(range(len(self.next_rounds)))
        changed, self._changed = sorted(self._changed), set()
        for colayer in changed:
            limit = min(self._sent_through[colayer][worker] for worker in members)
            while self.next_rounds[colayer] <= limit:
                number = self.next_rounds[colayer]
                self.next_rounds[colayer] += 1
                pending = self._pending[colayer]
                due = sorted(entry for entry in pending if entry[0] <= number)
                yield colayer, number, {entry: pending.pop(entry) for entry in due}


class SentContributions:
    """A worker's own payloads, kept until applied, because the owner of a piece may die."""

    def __init__(self, colayers: int) -> None:
        self._kept: list[deque[tuple[int, Sequence[Any]]]] = [deque() for _ in range(colayers)]

    def add(self, colayer: int, iteration: int, payloads: Sequence[Any]) -> None:
        """Keep the pieces of a colayer."""
        self._kept[colayer].append((iteration, payloads))

    def after(self, piece: int, watermarks: Sequence[int]) -> Iterator[tuple[int, int, Any]]:
        """Yield colayer, iteration and payload of a piece beyond the watermark of each colayer."""
        for colayer, kept in enumerate(self._kept):
            for iteration, payloads in kept:
                if iteration > watermarks[colayer]:
                    yield colayer, iteration, payloads[piece]

    def release(self, last_applied: Callable[[int], int]) -> None:
        """Discard the contributions of each colayer up to ``last_applied(colayer)``."""
        for colayer, kept in enumerate(self._kept):
            while kept and kept[0][0] <= last_applied(colayer):
                kept.popleft()


class Gei:
    """The gradient exchange index: which contributions are in the parameters (section 5.2).

    The matrix Q has a row of k integers for each iteration that any worker has entered; bit i of an
    integer is set when all pieces of worker i's colayer have arrived. The paper sets a bit as
    pieces arrive. Here a worker sets its own bits when it sends, because they decide whether its
    iteration is dropped, and the others' bits when a round is applied: a piece that has arrived may
    be summed again if its owner dies, and the index would otherwise differ between workers.

    Attributes:
        retired: number of complete rows that were removed.
        zeta: the last row, the iteration of the fastest worker; -1 before the first.
        counted: number of contributions of all workers in the parameters, counted by piece.
        rows: by iteration, colayer and piece: a mask of the workers whose pieces were applied.
    """

    def __init__(self, workers: int, colayers: int) -> None:
        self._workers, self._colayers = workers, colayers
        self.retired = self.counted = 0
        self.zeta = -1
        self.rows: dict[int, list[list[int]]] = {}
        self._own: dict[int, int] = {}  # by iteration: mask of sent colayers

    def enter(self, iteration: int) -> None:
        """Add the rows up to this iteration, which a worker has entered."""
        self.zeta = max(self.zeta, iteration)

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
        pieces = self.rows.get(iteration) or [[0]] * self._colayers
        out = [functools.reduce(operator.and_, masks) for masks in pieces]
        if own is not None:
            sent = self._own.get(iteration, 0)
            out = [mask | (sent >> colayer & 1) << own for colayer, mask in enumerate(out)]
        return tuple(out)

    def apply_round(self, parts: Sequence[PieceSum]) -> list[tuple[int, ...]]:
        """Count the contributions of a round, given all of its parts; return the retired rows.

        A row is retired when the bit of each worker is set or the worker is past this iteration.
        The round contains both facts, so all workers retire rows at the same round.
        """
        retired = []
        for part in parts:
            self.counted += len(part.entries)
            for iteration, worker in part.entries:
                self.enter(iteration)
                self._pieces(iteration)[part.colayer][part.piece] |= 1 << worker
        while self.retired <= self.zeta and self._is_complete(self.retired, parts):
            retired.append(self.row(self.retired))
            self.rows.pop(self.retired, None)
            self._own.pop(self.retired, None)
            self.retired += 1
        return retired

    def _is_complete(self, iteration: int, parts: Sequence[PieceSum]) -> bool:
        pieces = self._pieces(iteration)
        for part in parts:
            mask = pieces[part.colayer][part.piece]
            for worker, earliest in enumerate(part.earliest):
                if 0 <= earliest <= iteration and not mask >> worker & 1:
                    return False
        return True

    def _pieces(self, iteration: int) -> list[list[int]]:
        if iteration not in self.rows:
            self.rows[iteration] = [[0] * self._workers for _ in range(self._colayers)]
        return self.rows[iteration]

    def state(self) -> GeiState:
        """Return a copy for a worker that pulls parameters; it has no own bits."""
        return GeiState(self.retired, self.zeta, self.counted, copy.deepcopy(self.rows))

    def adopt(self, state: GeiState) -> None:
        """Continue from the state that came with pulled parameters; keep own bits."""
        self.retired, self.counted, self.rows = state.retired, state.counted, state.rows
        self._own = {i: mask for i, mask in self._own.items() if i >= self.retired}
        self.enter(state.zeta)

    def with_colayers(self, colayers: int, first: int) -> Gei:
        """Return the matrix with which training continues with a different number of colayers.

        Rows before ``first`` are complete. ``counted`` is scaled in proportion and rounded.
        """
        out = Gei(self._workers, colayers)
        out.counted = round(self.counted * colayers / self._colayers)
        out.retired = first
        out.enter(first)
        return out
