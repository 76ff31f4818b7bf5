"""Ring: each worker sends to the next and receives from the one before.

Every worker sends ``(P-1)/P`` of the buffer in ``P-1`` rounds, for reduce-scatter and for
all-gather alike: DeAR (Zhang et al., 2023), Eqs. 3 and 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from wingbeat.topologies.topology import Topology
from wingbeat.types import Recv, Round, Send, Span


@dataclass(frozen=True, slots=True)
class Ring(Topology):
    """Each worker sends to the next one."""

    symmetric: ClassVar[bool] = True

    def reduce_scatter(self, rank: int, blocks: Sequence[Span], interface: int = 0) -> list[Round]:
        """Sum all workers' buffers; afterwards ``blocks[rank]`` holds it, the rest is scratch."""
        size = len(blocks)
        return [
            _exchange(rank, blocks, (rank - k - 1) % size, (rank - k - 2) % size, True, interface)
            for k in range(size - 1)
        ]

    def all_gather(self, rank: int, blocks: Sequence[Span], interface: int = 0) -> list[Round]:
        """Spread every worker's ``blocks[rank]`` to all the others."""
        size = len(blocks)
        return [
            _exchange(rank, blocks, (rank - k) % size, (rank - k - 1) % size, False, interface)
            for k in range(size - 1)
        ]


def _exchange(
    rank: int, blocks: Sequence[Span], out: int, into: int, reduce: bool, interface: int
) -> Round:
    size = len(blocks)
    return (
        Send((rank + 1) % size, blocks[out], interface),
        Recv((rank - 1) % size, blocks[into], reduce, interface),
    )
