"""The all-reduce on a BCube of Canary's Table 2, for comparison with BML's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from wingbeat.topologies import BCube
from wingbeat.topologies.bcube import interleave
from wingbeat.types import Hop, Recv, Round, Send, Span


@dataclass(frozen=True, slots=True, repr=False)
class AggregatingBCube(BCube):
    """Canary's Table 2 as printed: pieces are summed completely before any is forwarded.

    Each of the ``levels`` parts (the paper's threads) of a worker's buffer is cut into ``ports``
    pieces. The worker at port ``j`` of each level-``t`` cube first sums piece ``j`` of part ``t``.
    The workers that hold such sums of one piece then exchange and add them along the other levels
    ("allgather" in the paper), and the pieces of a part are gathered along level ``t``
    ("allreduce"). The paper's last step, which combines the parts, sends nothing. Each of the
    ``levels + 1`` rounds sends ``1 - 1/ports`` of the buffer: 2.0 buffers in total for BCube(3, 2).

    The workers that hold the sum of one piece add it in different orders. With three ports or more,
    floating-point results may therefore differ between cubes by a rounding, so no strategy uses
    this topology.
    """

    in_place: ClassVar[bool] = False

    def reduce_scatter(self, rank: int, blocks: Sequence[Span], interface: int = 0) -> list[Round]:  # noqa: ARG002
        """Sum all workers' buffers into this worker's pieces, which include its block."""
        parts = self._parts(blocks)
        if not parts:
            return []
        rounds = [self._round(rank, parts, 0, True)]
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
        """Return one round, in which each worker sends its piece of every part to a whole cube."""
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
