"""The interface of topologies, and ring, mesh and doubling."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from wingbeat.errors import UsageError
from wingbeat.traits import ExchangePart
from wingbeat.types import Recv, Round, Send, Span

if TYPE_CHECKING:
    from wingbeat.engine.context import BuildContext
    from wingbeat.engine.runtime import Runtime
    from wingbeat.parts.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Topology(ExchangePart, ABC):
    """The connections over which the blocks of a buffer are sent.

    Implementations are frozen dataclasses, so that they can be compared and hashed, with pure
    methods. ``blocks[i]`` is the span that rank ``i`` owns. ``interface`` is the index of the
    network interface; each interface carries a part of every block.

    Attributes:
        spans_links: whether one program uses all interfaces: each hop has its interface, data may
            arrive on one and leave on another, and ``interface`` is 0.
        symmetric: whether each rank's rounds are those of rank 0 with all peers shifted by the
            rank, for blocks of equal length.
        in_place: whether sent data does not change until it has arrived; otherwise copies are
            sent.
    """

    collective: ClassVar[bool] = True
    spans_links: ClassVar[bool] = False
    symmetric: ClassVar[bool] = False
    in_place: ClassVar[bool] = True

    def fitted(self, workers: int, interfaces: int) -> Topology:  # noqa: ARG002
        """Return the topology for the given numbers of workers and interfaces, usually itself.

        Raises:
            UsageError: the topology does not support these numbers.
        """
        return self

    def check_networks(self, networks: Sequence[Sequence[str]]) -> None:
        """Check that the network connects the workers as required.

        Args:
            networks: for each rank, the subnet of each interface.

        Raises:
            UsageError: the network does not fit the topology.
        """

    def check(self, strategy: Strategy) -> None:
        """Raise a `UsageError` for a codec whose payloads cannot be sent along the topology."""
        codec = strategy.codec
        encoded = codec is not None and not codec.summed and not strategy.traits.gathered
        if self.spans_links and encoded:
            raise UsageError(
                f"Strategy(exchange={self!r}, compression={strategy.compression!r}): what is "
                "encoded goes straight to the worker that sums it, and most are no neighbours "
                'there; allowed: "bf16", "fp32", TopK() with whole all-reduces, or '
                'exchange="mesh"'
            )

    def build(self, context: BuildContext) -> Runtime:
        """Make a runtime that sums buckets by collectives along this topology."""
        return context.runtime(context.collective_exchange)

    @abstractmethod
    def reduce_scatter(self, rank: int, blocks: Sequence[Span], interface: int = 0) -> list[Round]:
        """Sum all buffers into ``blocks[rank]`` of each rank; other elements become undefined."""

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
        """Forward all blocks from ``root`` from rank to rank, one by one, so that hops overlap."""
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
    """Ring: each worker sends to the next rank and receives from the previous one.

    Reduce-scatter and all-gather each send ``(P-1)/P`` of the buffer in ``P-1`` rounds: DeAR (Zhang
    et al., 2023), Eqs. 3 and 4.
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
    """Mesh: direct exchange between all pairs of workers.

    Sends as many bytes as the ring, ``(P-1)/P`` of the buffer each way, but in one hop instead of
    ``P-1`` (Canary, section 4.2). Each worker sends to all peers concurrently, chunk by chunk,
    starting with the next rank, so that the first chunks can be forwarded before the last arrive.
    """

    symmetric: ClassVar[bool] = True

    def reduce_scatter(self, rank: int, blocks: Sequence[Span], interface: int = 0) -> list[Round]:
        """Send each worker its block; the owner adds contributions in a deterministic order."""
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
        """As `Topology.all_gather`."""
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
        """Send all blocks from ``root`` directly to all others, in one hop."""
        size = len(blocks)
        pieces = [block for block in blocks if block]
        if rank != root:
            return [(Recv(root, piece, False, interface),) for piece in pieces]
        others = [(root + k) % size for k in range(1, size)]
        return [tuple(Send(peer, piece, interface) for peer in others) for piece in pieces]


@dataclass(frozen=True, slots=True)
class Doubling(Topology):
    """Doubling: the number of received blocks doubles in each of ``ceil(log2 P)`` rounds.

    Sends as many bytes as the ring, ``(P-1)/P`` of the buffer each way, in the minimum number of
    rounds, for small payloads, where latency dominates (OMGS-SGD, section II-F). This is Bruck's
    variant of recursive doubling (Thakur, Rabenseifner and Gropp 2005, section 4.1), which supports
    any number of workers.
    """

    def reduce_scatter(self, rank: int, blocks: Sequence[Span], interface: int = 0) -> list[Round]:
        """As `Topology.reduce_scatter`; the reverse of the all-gather."""
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
    """Yield each round's distance to the peer and number of blocks."""
    step = 1
    while step < size:
        yield step, min(step, size - step)
        step *= 2


def _spans(blocks: Sequence[Span], last: int, count: int) -> list[Span]:
    """Return the ``count`` blocks that end with ``last``; adjacent blocks are merged."""
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
