"""What the measured speed of links changes of a collective, and what it must not."""

from __future__ import annotations

import pytest
import torch

from wingbeat import compression
from wingbeat.codecs import Coding, make
from wingbeat.codecs.coding import Region
from wingbeat.collectives import Collectives, Encoded
from wingbeat.transport import loopback
from wingbeat.transport.world import World
from wingbeat.types import Group, Span

NUMEL = 2**20
SLOW, FAST = 1.25e8, 1.25e9  # bytes a second: 1 and 10 Gbit/s


def summed(speed: float, wire: str = "") -> tuple[torch.Tensor, int]:
    """Rank 0's sum over two workers, and how many messages it has sent for that."""
    members = loopback.worlds(2)
    sent: list[int] = []

    def body(world: World) -> torch.Tensor:
        world.speeds = (speed,)
        [link] = world.links
        send = link.send
        if world.rank == 0:
            link.send = lambda *words: (sent.append(1), send(*words))[1]
        buffer = torch.randn(NUMEL, generator=torch.Generator().manual_seed(world.rank))
        encoded = None
        if wire:
            coding = Coding([Region(Span(0, NUMEL), make(compression.parse(wire)))])
            encoded = Encoded(coding, torch.zeros(NUMEL))
        Collectives(world).all_reduce(buffer, wire=encoded).wait()
        return buffer

    first, second = loopback.run(members, body)
    for world in members:
        world.close()
    assert torch.equal(first, second)
    return first, len(sent)


def test_fast_links_carry_fewer_messages_with_the_same_sum() -> None:
    (slow, many), (fast, few) = summed(SLOW), summed(FAST)
    assert torch.equal(slow, fast)
    assert few == many // 2


@pytest.mark.parametrize("wire", ["sketch", "fp16"])
def test_encoded_bytes_do_not_depend_on_measured_speeds(wire: str) -> None:
    """Else two runs on one cluster would train to other weights."""
    (slow, many), (fast, few) = summed(SLOW, wire), summed(FAST, wire)
    assert torch.equal(slow, fast)
    assert few == many


def test_group_on_one_interface_has_its_speed() -> None:
    members = loopback.worlds(2, interfaces=2)
    for world in members:
        world.speeds = (SLOW, FAST)
    world = members[0]
    assert world.open_group(Group((0, 1), 0), interface=1).speeds == (FAST,)
    assert world.open_group(Group((0, 1), 1)).speeds == (SLOW, FAST)
    for each in members:
        each.close()
