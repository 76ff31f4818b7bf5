"""Mesh: direct exchange between every two workers.

As many bytes as the ring, ``(P-1)/P`` of the buffer each way, but one hop instead of ``P-1``
(Canary, section 4.2). All peers are served at once, chunk by chunk, each worker beginning with the
next rank: so a block's first chunk is complete long before its last, and can go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from wingbeat.topologies.topology import Topology
from wingbeat.types import Recv, Round, Send, Span


@dataclass(frozen=True, slots=True)
class Mesh(Topology):
    """Every worker sends to every other one."""

    symmetric: ClassVar[bool] = True

    def reduce_scatter(self, rank: int, blocks: Sequence[Span], interface: int = 0) -> list[Round]:
        """Send each worker its block; afterwards ``blocks[rank]`` holds the sum.

        Contributions are added in the order of the hops, so every run gives the same bits.
        """
        size = len(blocks)
        after = [(rank + k) % size for k in range(1, size)]
        before = [(rank - k) % size for k in range(1, size)]
        return [
            (
                *(Send(peer, blocks[peer], interface) for peer in after),
                *(Recv(peer, blocks[rank], True, interface) for peer in before),
            )
        ]

    def all_gather(self, rank: int, blocks: Sequence[Span], interface: int = 0) -> list[Round]:
        """Send this worker's block to each of the others."""
        size = len(blocks)
        after = [(rank + k) % size for k in range(1, size)]
        before = [(rank - k) % size for k in range(1, size)]
        return [
            (
                *(Send(peer, blocks[rank], interface) for peer in after),
                *(Recv(peer, blocks[peer], False, interface) for peer in before),
            )
        ]

    def broadcast(
        self, rank: int, root: int, blocks: Sequence[Span], interface: int = 0
    ) -> list[Round]:
        """Send all blocks from ``root`` straight to the others: one hop, for what is small."""
        size = len(blocks)
        pieces = [block for block in blocks if block]
        if rank != root:
            return [(Recv(root, piece, False, interface),) for piece in pieces]
        others = [(root + k) % size for k in range(1, size)]
        return [tuple(Send(peer, piece, interface) for peer in others) for piece in pieces]
