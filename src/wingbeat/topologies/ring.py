"""Ring: each worker sends to the next and receives from the one before.

Every worker sends ``(P-1)/P`` of the buffer in ``P-1`` rounds, for reduce-scatter and for
all-gather alike: DeAR (Zhang et al., 2023), Eqs. 3 and 4.
"""

from __future__ import annotations

from collections.abc import Sequence

from wingbeat.types import Recv, Round, Send, Span


def reduce_scatter(rank: int, blocks: Sequence[Span], interface: int = 0) -> list[Round]:
    """Sum all workers' buffers; afterwards ``blocks[rank]`` holds the sum, the rest is scratch."""
    size = len(blocks)
    return [
        _exchange(rank, blocks, (rank - k - 1) % size, (rank - k - 2) % size, True, interface)
        for k in range(size - 1)
    ]


def all_gather(rank: int, blocks: Sequence[Span], interface: int = 0) -> list[Round]:
    """Spread every worker's ``blocks[rank]`` to all the others."""
    size = len(blocks)
    return [
        _exchange(rank, blocks, (rank - k) % size, (rank - k - 1) % size, False, interface)
        for k in range(size - 1)
    ]


def all_reduce(rank: int, blocks: Sequence[Span], interface: int = 0) -> list[Round]:
    """Reduce-scatter followed by all-gather: DeAR, Eq. 5."""
    return reduce_scatter(rank, blocks, interface) + all_gather(rank, blocks, interface)


def broadcast(
    rank: int, size: int, root: int, span: Span, pieces: int = 1, interface: int = 0
) -> list[Round]:
    """Pass ``span`` from ``root`` along the ring, piece after piece, so that hops overlap."""
    position = (rank - root) % size
    rounds: list[Round] = []
    for piece in span.cut(max(1, -(-len(span) // pieces))):
        if position > 0:
            rounds.append((Recv((rank - 1) % size, piece, False, interface),))
        if position < size - 1:
            rounds.append((Send((rank + 1) % size, piece, interface),))
    return rounds


def _exchange(
    rank: int, blocks: Sequence[Span], out: int, into: int, reduce: bool, interface: int
) -> Round:
    size = len(blocks)
    return (
        Send((rank + 1) % size, blocks[out], interface),
        Recv((rank - 1) % size, blocks[into], reduce, interface),
    )
