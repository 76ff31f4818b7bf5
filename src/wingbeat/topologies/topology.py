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
    """The connections along which the blocks of a buffer travel.

    Implementations are frozen dataclasses, so they can be compared and used as keys. Their methods
    are pure. ``blocks[i]`` is the span that rank ``i`` owns; ``interface`` is the number of the
    network interface that is used; of several interfaces each carries a share.

    Attributes:
        spans_links: whether its hops name interfaces themselves, so that one program uses all of
            them and data may arrive on one and leave on another; ``interface`` is 0 then.
        symmetric: whether each rank's rounds are rank 0's with all peers shifted by its number,
            for blocks of equal length.
        in_place: whether sent data stays unchanged until it has arrived; otherwise copies are
            sent.
    """

    spans_links: ClassVar[bool] = False
    symmetric: ClassVar[bool] = False
    in_place: ClassVar[bool] = True

    def fitted(self, workers: int, interfaces: int) -> Topology:  # noqa: ARG002
        """Return the topology for so many workers and interfaces: usually itself.

        Raises:
            UsageError: it does not fit.
        """
        return self

    def check_networks(self, networks: Sequence[Sequence[str]]) -> None:
        """Check that the workers are wired as required.

        Args:
            networks: for each rank, the subnet of each of its interfaces.

        Raises:
            UsageError: they are not.
        """

    @abstractmethod
    def reduce_scatter(self, rank: int, blocks: Sequence[Span], interface: int = 0) -> list[Round]:
        """Sum all workers' buffers; then ``blocks[rank]`` holds the sum, the rest is undefined."""

    @abstractmethod
    def all_gather(self, rank: int, blocks: Sequence[Span], interface: int = 0) -> list[Round]:
        """Send every worker's ``blocks[rank]`` to all others."""

    def all_reduce(self, rank: int, blocks: Sequence[Span], interface: int = 0) -> list[Round]:
        """Reduce-scatter followed by all-gather."""
        return [
            *self.reduce_scatter(rank, blocks, interface),
            *self.all_gather(rank, blocks, interface),
        ]

    def broadcast(
        self, rank: int, root: int, blocks: Sequence[Span], interface: int = 0
    ) -> list[Round]:
        """Forward all blocks from ``root`` from rank to rank, one by one, so that hops overlap.

        The blocks are merely pieces of the buffer here.
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
    """Ring: each worker sends to the next and receives from the one before.

    Every worker sends ``(P-1)/P`` of the buffer in ``P-1`` rounds, for reduce-scatter and for
    all-gather: DeAR (Zhang et al., 2023), Eqs. 3 and 4.
    """

    symmetric: ClassVar[bool] = True

    def reduce_scatter(self, rank: int, blocks: Sequence[Span], interface: int = 0) -> list[Round]:
        """As `Topology.reduce_scatter`."""
        size = len(blocks)
        return [
            _exchange(rank, blocks, (rank - k - 1) % size, (rank - k - 2) % size, True, interface)
            for k in range(size - 1)
        ]

    def all_gather(self, rank: int, blocks: Sequence[Span], interface: int = 0) -> list[Round]:
        """As `Topology.all_gather`."""
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
    """Mesh: direct exchange between every two workers.

    As many bytes as the ring, ``(P-1)/P`` of the buffer each way, but one hop instead of ``P-1``
    (Canary, section 4.2). All peers are served at once, chunk by chunk, each worker beginning with
    the next rank: a block's first chunk is complete long before its last, and can be sent on.
    """

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
        """As `Topology.all_gather`, directly."""
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
        """Send all blocks from ``root`` directly to the others: one hop, for small buffers."""
        size = len(blocks)
        pieces = [block for block in blocks if block]
        if rank != root:
            return [(Recv(root, piece, False, interface),) for piece in pieces]
        others = [(root + k) % size for k in range(1, size)]
        return [tuple(Send(peer, piece, interface) for peer in others) for piece in pieces]


@dataclass(frozen=True, slots=True)
class Doubling(Topology):
    """Doubling: the held blocks double with each round, so there are ``log2 P`` rounds, rounded up.

    As many bytes as the ring, ``(P-1)/P`` of the buffer each way, in the fewest possible rounds:
    for small payloads, where latency dominates (OMGS-SGD, section II-F). This is Bruck's variant of
    recursive doubling (Thakur, Rabenseifner and Gropp 2005, section 4.1), which works for every
    number of workers.
    """

    def reduce_scatter(self, rank: int, blocks: Sequence[Span], interface: int = 0) -> list[Round]:
        """As `Topology.reduce_scatter`: the all-gather reversed."""
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
        """As `Topology.all_gather`."""
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
    """Yield each round's distance to the peer, and the number of blocks sent."""
    step = 1
    while step < size:
        yield step, min(step, size - step)
        step *= 2


def _spans(blocks: Sequence[Span], last: int, count: int) -> list[Span]:
    """Return the ``count`` blocks that end with ``last``; adjacent ones are merged."""
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
