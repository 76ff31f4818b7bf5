"""One program over several links: what arrives on one leaves on another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from wingbeat.collectives import Collectives
from wingbeat.topologies import Ring, Topology
from wingbeat.transport import loopback
from wingbeat.transport.world import World
from wingbeat.types import Recv, Round, Send, Span


@dataclass(frozen=True, slots=True)
class Alternating(Topology):
    """A ring whose rounds take turns between two interfaces."""

    spans_links: ClassVar[bool] = True

    def reduce_scatter(self, rank: int, blocks: Sequence[Span], interface: int = 0) -> list[Round]:
        return _alternate(Ring().reduce_scatter(rank, blocks))

    def all_gather(self, rank: int, blocks: Sequence[Span], interface: int = 0) -> list[Round]:
        return _alternate(Ring().all_gather(rank, blocks))


def _alternate(rounds: list[Round]) -> list[Round]:
    out: list[Round] = []
    for number, hops in enumerate(rounds):
        interface = number % 2
        out.append(
            tuple(
                Send(s.peer, s.span, interface)
                if isinstance(s, Send)
                else Recv(s.peer, s.span, s.reduce, interface)
                for s in hops
            )
        )
    return out


class Counting:
    """A link that counts the bytes that it is given."""

    def __init__(self, link: object) -> None:
        self._link, self.sent = link, 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._link, name)

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> object:
        self.sent += tensor.nbytes
        return self._link.send(tensor, peer, tag)  # type: ignore[attr-defined]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_spanning_programs_alternate_with_programs_of_single_links(size: int) -> None:
    members = loopback.worlds(size, interfaces=2)
    for world in members:
        world.links = tuple(Counting(link) for link in world.links)  # type: ignore[arg-type]

    def body(world: World) -> list[torch.Tensor]:
        buffers = [torch.arange(40.0) * (world.rank + 1) + k for k in range(4)]
        spanning, striped = Collectives(world, Alternating()), Collectives(world)
        handles = [
            (spanning if k % 2 else striped).all_reduce(buffer, bucket=k)
            for k, buffer in enumerate(buffers)
        ]
        for handle in handles:
            handle.wait()
        return buffers

    for buffers in loopback.run(members, body):
        for k, buffer in enumerate(buffers):
            assert torch.equal(buffer, torch.arange(40.0) * (size * (size + 1) // 2) + k * size)
    for world in members:
        assert all(link.sent > 0 for link in world.links)  # type: ignore[attr-defined]
        world.close()
