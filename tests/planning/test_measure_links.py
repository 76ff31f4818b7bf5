"""Each network interface is measured by itself, and the whole world goes on as before."""

from __future__ import annotations

import time
from collections import Counter

import pytest
import torch

from helpers import late
from wingbeat.collectives import Collectives, native
from wingbeat.errors import PeerError
from wingbeat.planning.measure import measure_links
from wingbeat.transport import loopback
from wingbeat.transport.world import World


class Watched:
    """A link that notes its use, and takes its time to receive."""

    def __init__(self, link, used: list[str], delay_s: float) -> None:
        self.link, self.used, self.delay_s = link, used, delay_s
        self.name = link.name

    def send(self, tensor, peer: int, tag: int):
        self.used.append(self.name)
        return self.link.send(tensor, peer, tag)

    def recv(self, tensor, peer: int, tag: int):
        return Delayed(self.link.recv(tensor, peer, tag), self.delay_s)

    def abort_waits(self) -> None:
        self.link.abort_waits()

    def close(self) -> None:
        self.used.append("closed")
        self.link.close()


class Delayed:
    def __init__(self, pending, delay_s: float) -> None:
        self.pending, self.delay_s = pending, delay_s

    def wait(self, seconds: float) -> None:
        self.pending.wait(seconds)
        time.sleep(self.delay_s)


def executors() -> int:
    """Return the number of executors that are open."""
    return sum(not each._closing for of in native._executors.values() for each in of)


def test_measure_links_each_interface_alone_then_all() -> None:
    used: list[list[str]] = [[], [], []]
    delay_s = 0.004

    def body(world: World):
        found = measure_links(Collectives(world), largest_bytes=4096, repeats=1, budget_s=1e9)
        seen = list(used[world.rank])
        # The whole world goes on as before.
        after = torch.full((1000,), float(world.rank))
        Collectives(world).all_reduce(after).wait()
        assert torch.equal(after, torch.full((1000,), 3.0))
        return found, seen

    with late.open_worlds(3, interfaces=2) as (members, _):
        for world in members:
            delays = (0.0, delay_s)
            pairs = zip(world.links, delays, strict=True)
            world.links = tuple(Watched(link, used[world.rank], delay) for link, delay in pairs)
            Collectives(world)
        before = executors()
        results = loopback.run(members, body)
        assert executors() <= before  # those of earlier tests may end meanwhile
    found = results[0][0]
    assert [each for each, _ in results] == [found] * 3
    assert [link.name for link in found] == ["lo0", "lo1", "lo0 + lo1"]
    for link in found:
        for points in (link.all_gather.samples, link.all_reduce.samples):
            assert [nbytes for nbytes, _ in points] == [1024.0, 4096.0]
            # Two rounds of doubling, four of a ring; what the second interface delays is seen.
            assert all(seconds > ("lo1" in link.name) * 2 * delay_s for _, seconds in points)
    for _, seen in results:
        # As many messages on the first as on the second, then on both. A barrier is one element,
        # which goes over one of them: 2 of the 4 messages of an all-gather, 2 of an all-reduce's 6.
        alone = seen.index("lo1")
        assert seen[: 2 * alone] == ["lo0"] * alone + ["lo1"] * alone
        together = Counter(seen[2 * alone :])
        assert set(together) == {"lo0", "lo1"}
        assert sorted(together.values()) == [alone * 6 // 10, alone]


def test_measure_links_single_interface_is_measured_once() -> None:
    with late.open_worlds(2) as (members, _):
        found = loopback.run(
            members, lambda world: measure_links(Collectives(world), largest_bytes=2048, repeats=1)
        )
    assert [link.name for link in found[0]] == ["lo0"]


def test_measure_links_missing_worker_is_named_and_link_is_closed() -> None:
    """Closed, so that the others notice; a loan that ends well does not close it."""
    used: list[list[str]] = [[], [], []]

    def body(world: World) -> str:
        if world.rank == 1:
            return ""
        with pytest.raises(PeerError) as caught:
            measure_links(Collectives(world), repeats=1)
        return str(caught.value)

    with late.open_worlds(3, interfaces=2) as (members, _):
        for world in members:
            world.timeout = 0.3
            world.links = tuple(Watched(link, used[world.rank], 0.0) for link in world.links)
        first, _, last = loopback.run(members, body)
        assert "rank 1 failed during all-gather on interface lo0" in first
        assert "rank 1 failed during all-gather on interface lo0" in last
        assert used[0].count("closed") == used[2].count("closed") == 1


def test_measure_links_bcube_interfaces_use_ring() -> None:
    """By itself an interface makes no BCube(2, 2): then a ring says what it is worth."""
    with late.open_worlds(4, interfaces=2) as (members, _):
        found = loopback.run(
            members,
            lambda world: measure_links(
                Collectives(world, "bcube"), topology="bcube@2x2", largest_bytes=2048, repeats=1
            ),
        )
    assert [link.name for link in found[0]] == ["lo0", "lo1", "lo0 + lo1"]
