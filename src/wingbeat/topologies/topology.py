"""The interface of topologies, and ring, mesh and doubling."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
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

    ``spans_links``: one program uses all interfaces. Each hop has its interface, data may arrive on
    one and leave on another, and ``interface`` is 0. ``symmetric``: each rank's rounds are those of
    rank 0 with all peers shifted by the rank, for blocks of equal length; in `Hierarchical`, of
    hosts with equal numbers of consecutive workers, shifted by whole hosts. ``in_place``: sent data
    does not change until it has arrived; otherwise copies are sent.
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
        """Raise a `UsageError` unless the network connects the workers as required.

        ``networks`` has the subnet of each interface, for each rank.
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
        order = [(root + k) % size for k in range(size)]
        return forward_along(order, rank, blocks, interface)


def forward_along(
    order: Sequence[int], rank: int, blocks: Sequence[Span], interface: int
) -> list[Round]:
    """Forward all blocks from the first worker of ``order`` to the last, one by one."""
    position = order.index(rank)
    rounds: list[Round] = []
    for block in filter(None, blocks):
        if position > 0:
            rounds.append((Recv(order[position - 1], block, False, interface),))
        if position < len(order) - 1:
            rounds.append((Send(order[position + 1], block, interface),))
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
        return self._rounds(rank, rank - 1, blocks, True, interface)

    def all_gather(self, rank: int, blocks: Sequence[Span], interface: int = 0) -> list[Round]:
        """As `Topology.all_gather`."""
        return self._rounds(rank, rank, blocks, False, interface)

    def _rounds(
        self, rank: int, first: int, blocks: Sequence[Span], reduce: bool, interface: int
    ) -> list[Round]:
        """Send block ``first`` in the first round, then what arrived in the round before."""
        size = len(blocks)
        after, before = (rank + 1) % size, (rank - 1) % size
        return [
            (
                Send(after, blocks[(first - k) % size], interface),
                Recv(before, blocks[(first - k - 1) % size], reduce, interface),
            )
            for k in range(size - 1)
        ]


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
        after, before = _others(rank, len(blocks))
        sends = (Send(peer, blocks[peer], interface) for peer in after)
        return [(*sends, *(Recv(peer, blocks[rank], True, interface) for peer in before))]

    def all_gather(self, rank: int, blocks: Sequence[Span], interface: int = 0) -> list[Round]:
        """As `Topology.all_gather`."""
        after, before = _others(rank, len(blocks))
        sends = (Send(peer, blocks[rank], interface) for peer in after)
        return [(*sends, *(Recv(peer, blocks[peer], False, interface) for peer in before))]

    def broadcast(
        self, rank: int, root: int, blocks: Sequence[Span], interface: int = 0
    ) -> list[Round]:
        """Send all blocks from ``root`` directly to all others, in one hop."""
        pieces = [block for block in blocks if block]
        if rank != root:
            return [(Recv(root, piece, False, interface),) for piece in pieces]
        after, _ = _others(root, len(blocks))
        return [tuple(Send(peer, piece, interface) for peer in after) for piece in pieces]


def _others(rank: int, size: int) -> tuple[list[int], list[int]]:
    """Return the other ranks, from the next one upwards, and from the previous one downwards."""
    return [(rank + k) % size for k in range(1, size)], [(rank - k) % size for k in range(1, size)]


@dataclass(frozen=True, slots=True)
class Doubling(Topology):
    """Doubling: the number of received blocks doubles in each of ``ceil(log2 P)`` rounds.

    Sends as many bytes as the ring, ``(P-1)/P`` of the buffer each way, in the minimum number of
    rounds, for small payloads, where latency dominates (OMGS-SGD, section II-F). This is Bruck's
    variant of recursive doubling (Thakur, Rabenseifner and Gropp 2005, section 4.1), which supports
    any number of workers.
    """

    symmetric: ClassVar[bool] = True

    def reduce_scatter(self, rank: int, blocks: Sequence[Span], interface: int = 0) -> list[Round]:
        """As `Topology.reduce_scatter`; the reverse of the all-gather."""
        rounds = reversed(self._rounds(rank, blocks))
        return [
            (
                *(Send(before, span, interface) for span in theirs),
                *(Recv(after, span, True, interface) for span in own),
            )
            for after, own, before, theirs in rounds
        ]

    def all_gather(self, rank: int, blocks: Sequence[Span], interface: int = 0) -> list[Round]:
        """As `Topology.all_gather`."""
        return [
            (
                *(Send(after, span, interface) for span in own),
                *(Recv(before, span, False, interface) for span in theirs),
            )
            for after, own, before, theirs in self._rounds(rank, blocks)
        ]

    def _rounds(
        self, rank: int, blocks: Sequence[Span]
    ) -> list[tuple[int, list[Span], int, list[Span]]]:
        """Return by round of the all-gather the receiver and its blocks, the sender and its own."""
        size, step, rounds = len(blocks), 1, []
        while step < size:
            count = min(step, size - step)
            own, theirs = _spans(blocks, rank, count), _spans(blocks, rank - step, count)
            rounds.append(((rank + step) % size, own, (rank - step) % size, theirs))
            step *= 2
        return rounds


def _spans(blocks: Sequence[Span], last: int, count: int) -> list[Span]:
    """Return the ``count`` blocks that end with ``last``, in the order in which it received them.

    A block of its own comes first. Both ends thus send and receive in one order.
    """
    return [blocks[(last - k) % len(blocks)] for k in range(count)]
