"""Mesh: direct exchange between every two workers.

As many bytes as the ring, ``(P-1)/P`` of the buffer each way, but one hop instead of ``P-1``
(Canary, section 4.2). Round ``k`` pairs rank ``r`` with ``r+k``, so that no two workers send
to the same one at the same moment.
"""

from __future__ import annotations

from collections.abc import Sequence

from wingbeat.types import Recv, Round, Send, Span


def reduce_scatter(rank: int, blocks: Sequence[Span], interface: int = 0) -> list[Round]:
    """Send each worker its block; afterwards ``blocks[rank]`` holds the sum.

    Contributions are added in the order of the rounds, so every run gives the same bits.
    """
    size = len(blocks)
    return [
        (
            Send((rank + k) % size, blocks[(rank + k) % size], interface),
            Recv((rank - k) % size, blocks[rank], True, interface),
        )
        for k in range(1, size)
    ]


def all_gather(rank: int, blocks: Sequence[Span], interface: int = 0) -> list[Round]:
    """Send this worker's block to each of the others."""
    size = len(blocks)
    return [
        (
            Send((rank + k) % size, blocks[rank], interface),
            Recv((rank - k) % size, blocks[(rank - k) % size], False, interface),
        )
        for k in range(1, size)
    ]


def all_reduce(rank: int, blocks: Sequence[Span], interface: int = 0) -> list[Round]:
    """Reduce-scatter followed by all-gather."""
    return reduce_scatter(rank, blocks, interface) + all_gather(rank, blocks, interface)
