"""What every topology is: a frozen value that tells each rank its rounds of hops."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
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
