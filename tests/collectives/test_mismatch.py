"""Collectives that do not match end in an error on both sides, never in a sum."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from wingbeat.collectives import Collectives
from wingbeat.collectives.waits import CallTable
from wingbeat.errors import PeerError
from wingbeat.transport import loopback
from wingbeat.transport.world import World
from wingbeat.types import Group

Act = Callable[[World], object]
Start = Callable[[Collectives, torch.Tensor], object]

CALLS: dict[str, Start] = {
    "all-reduce of bucket 3": lambda c, x: c.all_reduce(x, bucket=3).wait(),
    "all-reduce of bucket 4": lambda c, x: c.all_reduce(x, bucket=4).wait(),
    "all-gather of bucket 3": lambda c, x: c.all_gather(x, bucket=3).wait(),
    "all-gather of norms": lambda c, x: c.all_gather(x, label="norms").wait(),
    "all-gather of batches left": lambda c, x: c.all_gather(x, label="batches left").wait(),
}


@pytest.mark.parametrize("mine", CALLS)
@pytest.mark.parametrize("theirs", CALLS)
def test_only_matching_collectives_exchange_messages(mine: str, theirs: str) -> None:
    def body(world: World) -> str:
        x = torch.ones(8)
        try:
            CALLS[(mine, theirs)[world.rank]](Collectives(world), x)
        except PeerError as err:
            return str(err)
        return ""

    members = loopback.worlds(2, timeout=0.2)
    said = loopback.run(members, body)
    for world in members:
        world.close()
    if mine == theirs:
        assert said == ["", ""]
        return
    assert all(said)
    # Whoever looks second knows what the other was doing.
    assert f"was in {theirs}" in said[0] or f"was in {mine}" in said[1], said
    assert "same calls" in "".join(said)


def of(numel: int = 8, dtype: torch.dtype = torch.float32, **how: Any) -> Act:
    topology = how.pop("topology", "ring")
    return lambda world: (
        Collectives(world, topology).all_reduce(torch.ones(numel, dtype=dtype), **how).wait()
    )


IN_GROUPS: dict[str, Act] = {
    "as it should be": of(),
    "another size": of(9),
    "a size with the same three bits": of(12),
    "another dtype of as many bytes": of(dtype=torch.int32),
    "another wire": of(wire=torch.bfloat16),
    "a bucket": of(bucket=3),
    "a bucket of another size": of(4000, bucket=3),
    "another topology": of(topology="mesh"),
}


@pytest.mark.parametrize("theirs", list(IN_GROUPS)[1:])
@pytest.mark.parametrize("mine", ["as it should be", "a bucket"])
def test_group_calls_that_differ_in_any_property_do_not_match(mine: str, theirs: str) -> None:
    """Over sockets a message that is larger than the room for it would end the process."""

    def body(world: World) -> str:
        with world.open_group(Group((0, 1))) as members:
            try:
                IN_GROUPS[(mine, theirs)[world.rank]](members)
            except PeerError as err:
                return str(err)
        return ""

    members = loopback.worlds(2, timeout=0.05)
    said = loopback.run(members, body)
    for world in members:
        world.close()
    # The other may have given up the group before this one was at it.
    assert all("group (0, 1) of epoch 0" in text for text in said) or mine == theirs, said


@pytest.mark.parametrize("theirs", ["another size", "another dtype of as many bytes", "a bucket"])
def test_different_calls_are_named_before_the_timeout(theirs: str) -> None:
    """With their sizes and dtypes, on both ranks."""

    def body(world: World) -> str:
        try:
            IN_GROUPS[("as it should be", theirs)[world.rank]](world)
        except PeerError as err:
            return str(err)
        return ""

    members = loopback.worlds(2, timeout=60)
    begin = time.monotonic()
    said = loopback.run(members, body)
    for world in members:
        world.close()
    assert time.monotonic() - begin < 20
    calls = {
        "another size": "all-reduce (9 elements, float32)",
        "another dtype of as many bytes": "all-reduce (8 elements, int32)",
        "a bucket": "all-reduce of bucket 3 (8 elements, float32)",
    }
    mine = "all-reduce (8 elements, float32)"
    assert f"rank 1 was in {calls[theirs]} while this rank waited for it in {mine}" in said[0]
    assert f"rank 0 was in {mine} while this rank waited for it in {calls[theirs]}" in said[1]


@pytest.mark.timeout(60)
def test_equal_calls_may_wait_for_long() -> None:
    """They look at each other's calls, which says nothing; also from one collective to the next."""

    def body(world: World) -> list[float]:
        collectives, found = Collectives(world), []
        for late in (0, 1):
            if world.rank == late:
                assert asked.acquire(timeout=20)
            buffers = [torch.ones(8), torch.ones(3, dtype=torch.float64)]
            handles = [collectives.all_reduce(x, bucket=n) for n, x in enumerate(buffers)]
            handles[1].wait()
            handles[0].wait()
            found += [float(x.sum()) for x in buffers]
        return found

    asked = threading.Semaphore(0)
    members = loopback.worlds(2, timeout=50)
    compare = CallTable.compare
    CallTable.compare = lambda *args: (compare(*args), asked.release())[0]  # type: ignore[method-assign]
    try:
        assert loopback.run(members, body) == [[16.0, 6.0, 16.0, 6.0]] * 2
    finally:
        CallTable.compare = compare  # type: ignore[method-assign]
    for world in members:
        world.close()


def test_channels_exchange_no_messages() -> None:
    def body(world: World) -> list[float]:
        first, second = world.open_channel(), world.open_channel()
        order = [(first, 1.0), (second, 10.0)]
        if world.rank:
            order.reverse()
        handles = []
        for channel, value in order:
            buffer = torch.full((6,), value)
            handles.append((value, buffer, Collectives(channel).all_reduce(buffer, bucket=0)))
        for _, _, handle in handles:
            handle.wait()
        return [float(buffer[0]) for _, buffer, _ in sorted(handles, key=lambda h: h[0])]

    members = loopback.worlds(2, timeout=5)
    assert loopback.run(members, body) == [[2.0, 20.0]] * 2
    for world in members:
        world.close()


def test_channel_is_released_once() -> None:
    def body(world: World) -> list[int]:
        first = world.open_channel()
        numbers = [first.channel]
        first.close()
        second = world.open_channel()
        numbers.append(second.channel)
        del first  # collected after another has its number
        third = world.open_channel()
        return [*numbers, third.channel]

    members = loopback.worlds(2, timeout=5)
    assert loopback.run(members, body) == [[1, 1, 2]] * 2
    for world in members:
        world.close()
