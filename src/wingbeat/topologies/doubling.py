"""Doubling: what a worker holds doubles with each round, so the rounds are ``log2 P``, rounded up.

As many bytes as the ring, ``(P-1)/P`` of the buffer each way, in the fewest rounds in which anybody
can reach everybody: for payloads so small that latency decides (OMGS-SGD, section II-F). This is
Bruck's variant of recursive doubling (Thakur, Rabenseifner and Gropp 2005, section 4.1), which
works for every number of workers and not for powers of two alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from wingbeat.topologies.topology import Topology
from wingbeat.types import Recv, Round, Send, Span


@dataclass(frozen=True, slots=True)
class Doubling(Topology):
    """Each worker exchanges with others at distances of 1, 2, 4 ..."""

    def reduce_scatter(self, rank: int, blocks: Sequence[Span], interface: int = 0) -> list[Round]:
        """Sum all workers' buffers; afterwards ``blocks[rank]`` holds the sum, the rest is scratch.

        The all-gather backwards: where a block would have come from, its sum goes to.
        """
        size = len(blocks)
        return [
            _round(
                interface,
                send=((rank - step) % size, _spans(blocks, rank - step, count)),
                receive=((rank + step) % size, _spans(blocks, rank, count)),
                reduce=True,
            )
            for step, count in reversed(list(_steps(size)))
        ]

    def all_gather(self, rank: int, blocks: Sequence[Span], interface: int = 0) -> list[Round]:
        """Spread every worker's ``blocks[rank]`` to all the others."""
        size = len(blocks)
        return [
            _round(
                interface,
                send=((rank + step) % size, _spans(blocks, rank, count)),
                receive=((rank - step) % size, _spans(blocks, rank - step, count)),
                reduce=False,
            )
            for step, count in _steps(size)
        ]


def _steps(size: int) -> Iterator[tuple[int, int]]:
    """Yield each round's distance to the peer, and how many blocks go there."""
    step = 1
    while step < size:
        yield step, min(step, size - step)
        step *= 2


def _spans(blocks: Sequence[Span], last: int, count: int) -> list[Span]:
    """Return the ``count`` blocks that end with ``last``; neighbours that touch become one span."""
    size = len(blocks)
    out: list[Span] = []
    for index in sorted((last - k) % size for k in range(count)):
        if out and out[-1].stop == blocks[index].start:
            out[-1] = Span(out[-1].start, blocks[index].stop)
        else:
            out.append(blocks[index])
    return out


def _round(
    interface: int,
    *,
    send: tuple[int, Iterable[Span]],
    receive: tuple[int, Iterable[Span]],
    reduce: bool,
) -> Round:
    return (
        *(Send(send[0], span, interface) for span in send[1]),
        *(Recv(receive[0], span, reduce, interface) for span in receive[1]),
    )
