"""Another all-reduce on a BCube, to be compared with BML's: that of Canary's Table 2."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from wingbeat.topologies import BCube
from wingbeat.topologies.bcube import interleave
from wingbeat.types import Hop, Recv, Round, Send, Span


@dataclass(frozen=True, slots=True, repr=False)
class AggregatingBCube(BCube):
    """Canary's Table 2 as it is written: pieces are summed whole before any is passed on.

    Each of the ``levels`` parts (the paper's threads) of a worker's buffer is cut into ``ports``
    pieces. Piece ``j`` of part ``t`` is first summed by the worker at port ``j`` of each
    level-``t`` cube; then the workers that hold such sums of one piece exchange and add them along
    the other levels ("allgather" in the paper), so that each has the whole sum; then the pieces of
    a part are gathered along level ``t`` ("allreduce"), and what the paper calls the last step, to
    combine the parts, sends nothing. That is ``levels + 1`` rounds, in each of which
    ``1 - 1/ports`` of the buffer is sent: 2.0 buffers for BCube(3, 2).

    The workers that hold the sum of one piece have each added it in another order: from three
    ports on, results of floating point numbers may differ between cubes by a rounding. So it has
    no name, and no strategy trains with it.
    """

    in_place: ClassVar[bool] = False

    def reduce_scatter(self, rank: int, blocks: Sequence[Span], interface: int = 0) -> list[Round]:  # noqa: ARG002
        """Sum all workers' buffers into this worker's pieces, its block among them."""
        parts = self._parts(blocks)
        if not parts:
            return []
        rounds = [self._scatter(rank, parts, 0)]
        for step in range(1, self.levels):
            rounds.append(self._spread(rank, parts, step, reduce=True))
        return rounds

    def all_reduce(self, rank: int, blocks: Sequence[Span], interface: int = 0) -> list[Round]:
        """Sum all workers' buffers on every worker."""
        parts = self._parts(blocks)
        rounds = self.reduce_scatter(rank, blocks, interface)
        return [*rounds, self._spread(rank, parts, 0, reduce=False)] if parts else []

    def _spread(
        self, rank: int, parts: Sequence[Sequence[Span]], step: int, *, reduce: bool
    ) -> Round:
        """One round, in which each worker sends its piece of every part to a whole cube."""
        return interleave(
            self._spread_part(rank, parts, part, (part + step) % self.levels, reduce)
            for part in range(self.levels)
        )

    def _spread_part(
        self, rank: int, parts: Sequence[Sequence[Span]], part: int, level: int, reduce: bool
    ) -> Iterator[Hop]:
        for peer in self._others(rank, level):
            yield from (Send(peer, s, level) for s in self._piece(rank, parts, part))
        for peer in self._others(rank, level, -1):
            for span in self._piece(peer, parts, part):
                yield Recv(peer, span, reduce, level)

    def _piece(self, rank: int, parts: Sequence[Sequence[Span]], part: int) -> Iterator[Span]:
        """Yield the spans of the piece of a part that the worker sums."""
        return (parts[block][part] for block in self._agreeing(rank, [part]))

    def _agreeing(self, rank: int, levels: Sequence[int]) -> list[int]:
        """Return the blocks whose owners have the digits of ``rank`` at these levels."""
        return [
            block
            for block in range(self.workers)
            if all(self.digit(block, at) == self.digit(rank, at) for at in levels)
        ]
