"""In which order chunks go to a link, and to whom; and what becomes of what waits in the queue."""

from __future__ import annotations

import threading

import pytest
import torch

from wingbeat import compression
from wingbeat.codecs import Coding, make
from wingbeat.codecs.coding import Region
from wingbeat.collectives import Collectives, Encoded
from wingbeat.errors import PeerError
from wingbeat.transport import loopback
from wingbeat.transport.link import Link, Pending
from wingbeat.transport.world import World
from wingbeat.types import Span


class Noting:
    """A link that notes what it is given to send; nothing arrives before the gate is open."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.name = link.name
        self.sent: list[tuple[int, torch.Tensor]] = []
        self.announced = threading.Semaphore(0)
        self.gate = threading.Event()

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        self.sent.append((peer, tensor))
        return self._link.send(tensor, peer, tag)

    def recv(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        self.announced.release()
        return Gated(self._link.recv(tensor, peer, tag), self.gate)

    def close(self) -> None:
        self._link.close()


class Gated:
    def __init__(self, pending: Pending, gate: threading.Event) -> None:
        self._pending, self._gate = pending, gate

    def wait(self, seconds: float) -> None:
        assert self._gate.wait(20), "nobody opened the gate"
        self._pending.wait(seconds)


def noting(members: list[World], *, closed: bool = False) -> list[Noting]:
    """Have each world's only link noted."""
    links = [Noting(world.links[0]) for world in members]
    for world, link in zip(members, links, strict=True):
        world.links = (link,)
        if not closed:
            link.gate.set()
    return links


def test_collective_begins_when_the_previous_one_has_sent_its_last_chunk() -> None:
    """If it began earlier its chunks would stand before that one's in the socket."""
    members = loopback.worlds(2)
    link, other = noting(members, closed=True)
    other.gate.set()
    buffers = [[torch.ones(8) for _ in range(3)] for _ in members]

    def body(world: World) -> None:
        collectives, mine = Collectives(world), buffers[world.rank]
        # While the gate is closed the link's thread waits in the first; the others queue up.
        handles = [collectives.all_gather(mine[0], bucket=0)]
        handles += [collectives.all_reduce(x, bucket=n) for n, x in enumerate(mine[1:], 1)]
        link.gate.set()
        for handle in handles:
            handle.wait()

    loopback.run(members, body)
    starts = [x.untyped_storage().data_ptr() for x in buffers[0]]
    order = [starts.index(chunk.untyped_storage().data_ptr()) for _, chunk in link.sent]
    assert order == [0, 1, 1, 2, 2]
    for world in members:
        world.close()


@pytest.mark.parametrize(("numel", "peers"), [(1000, {1, 2}), (30_000, {1})])
def test_small_payloads_are_gathered_by_doubling_and_large_ones_around_the_ring(
    numel: int, peers: set[int]
) -> None:
    settings = compression.parse("fp16")
    assert not isinstance(settings, str)

    def body(world: World) -> None:
        encoded = Encoded(Coding([Region(Span(0, numel), make(settings))]))
        buffer = torch.ones(numel)
        Collectives(world).all_gather_sum(buffer, wire=encoded).wait()
        assert torch.equal(buffer, torch.full((numel,), 4.0))

    members = loopback.worlds(4)
    links = noting(members)
    loopback.run(members, body)
    assert {peer for peer, _ in links[0].sent} == peers
    for world in members:
        world.close()


@pytest.mark.timeout(60)
def test_collectives_queued_after_a_failure_fail() -> None:
    """Its workers would otherwise wait for ever."""
    first, _ = members = loopback.worlds(2, timeout=0.2)
    [link, _] = noting(members, closed=True)
    collectives = Collectives(first)
    handles = [collectives.all_reduce(torch.ones(8), bucket=n) for n in range(6)]
    link.gate.set()
    for handle in handles:
        with pytest.raises(PeerError, match="rank 1 failed during all-reduce of bucket 0"):
            handle.wait()
    for world in members:
        world.close()


def test_gather_continues_with_its_reduction_past_another_collective() -> None:
    members = loopback.worlds(2, timeout=2)
    links = noting(members, closed=True)

    def body(world: World) -> list[float]:
        collectives = Collectives(world)
        buffers = [torch.full((8,), 10.0**n) for n in range(2)]
        reduced = [collectives.reduce_scatter(x, bucket=n) for n, x in enumerate(buffers)]
        handles = [
            collectives.all_gather(x, bucket=n, after=reduced[n]) for n, x in enumerate(buffers)
        ]
        # Both reductions and the first gather, which waits for the first of them, have begun.
        for _ in range(3):
            assert links[world.rank].announced.acquire(timeout=20)
        links[world.rank].gate.set()
        for handle in handles:
            handle.wait()
        return [float(x.mean()) for x in buffers]

    assert loopback.run(members, body) == [[2.0, 20.0]] * 2
    for world in members:
        world.close()
