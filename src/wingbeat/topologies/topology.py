"""Topologies: frozen values that give each rank its rounds of hops. Ring, mesh and doubling."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from wingbeat.traits import Part
from wingbeat.types import Recv, Round, Send, Span


@dataclass(frozen=True, slots=True)
class Topology(Part, ABC):
    """Along which connections the blocks of a buffer go.

    Implementations are frozen dataclasses, so that they can be compared and be keys. Their methods
    are pure. ``blocks[i]`` is the span that rank ``i`` owns; ``interface`` is the number of the
    network interface that all of it goes over; where there are several, each carries a part.

    Attributes:
        spans_links: whether its hops name interfaces by themselves, so that one program uses all
            of them and what arrives on one may leave on another; ``interface`` is 0 then.
        symmetric: whether each rank's rounds are rank 0's with all peers moved on by its number,
            where blocks are equally long.
        in_place: whether what is sent stays as it is until it has arrived; if not, who executes it
            sends copies.
    """

    spans_links: ClassVar[bool] = False
    symmetric: ClassVar[bool] = False
    in_place: ClassVar[bool] = True

    def fitted(self, workers: int, interfaces: int) -> Topology:  # noqa: ARG002
        """Return what goes for so many workers with so many interfaces each: itself, mostly.

        Raises:
            UsageError: it is not for them.
        """
        return self

    def check_networks(self, networks: Sequence[Sequence[str]]) -> None:
        """Check that the workers are wired as it has to be.

        Args:
            networks: for each rank, the subnet of each of its interfaces.

        Raises:
            UsageError: they are not.
        """

    @abstractmethod
    def reduce_scatter(self, rank: int, blocks: Sequence[Span], interface: int = 0) -> list[Round]:
        """Sum all workers' buffers; afterwards ``blocks[rank]`` holds it, the rest is scratch."""

    @abstractmethod
    def all_gather(self, rank: int, blocks: Sequence[Span], interface: int = 0) -> list[Round]:
        """Spread every worker's ``blocks[rank]`` to all the others."""

    def all_reduce(self, rank: int, blocks: Sequence[Span], interface: int = 0) -> list[Round]:
        """Reduce-scatter followed by all-gather."""
        return [
            *self.reduce_scatter(rank, blocks, interface),
            *self.all_gather(rank, blocks, interface),
        ]

    def broadcast(
        self, rank: int, root: int, blocks: Sequence[Span], interface: int = 0
    ) -> list[Round]:
        """Pass all blocks from ``root`` on from rank to rank, one by one, so that hops overlap.

        A broadcast has no owners; the blocks are merely its pieces.
        """
        size = len(blocks)
        position = (rank - root) % size
        rounds: list[Round] = []
        for block in filter(None, blocks):
            if position > 0:
                rounds.append((Recv((rank - 1) % size, block, False, interface),))
            if position < size - 1:
                rounds.append((Send((rank + 1) % size, block, interface),))
        return rounds


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
