"""Tags: messages of collectives that do not match never meet."""

from __future__ import annotations

import itertools

import torch

from helpers import late
from wingbeat.collectives import Collectives
from wingbeat.collectives.executor import CHUNKS_PER_TAG, TAG_PERIOD, call_tag
from wingbeat.collectives.handle import Call
from wingbeat.collectives.program import DEPTH
from wingbeat.transport import loopback
from wingbeat.transport.link import TAG_BITS
from wingbeat.transport.world import World

OPERATIONS = ("reduce_scatter", "all_gather", "all_reduce")
EIGHT = torch.zeros(8)


def _tags(turn: int) -> list[int]:
    """One of every operation on 200 buckets."""
    calls = itertools.product(OPERATIONS, range(200))
    return [call_tag(Call(EIGHT, what, bucket), turn) for what, bucket in calls]


def test_neither_operations_nor_buckets_nor_turns_share_a_tag() -> None:
    found = [tag for turn in range(TAG_PERIOD) for tag in _tags(turn)]
    assert len(set(found)) == len(found)
    # Nor do their chunks, which count on from there.
    assert all(tag % CHUNKS_PER_TAG == 0 for tag in found)


def test_tags_repeat_and_fit() -> None:
    assert _tags(TAG_PERIOD + 3) == _tags(3)
    found = [tag for turn in range(2 * TAG_PERIOD) for tag in _tags(turn)]
    assert min(found) >= 0
    assert 1 << (TAG_BITS - 1) < max(found) <= (1 << TAG_BITS) - CHUNKS_PER_TAG


def test_tags_of_collectives_in_flight_differ() -> None:
    """Begun here and begun at a peer that is as far ahead as it can be."""
    assert TAG_PERIOD > 2 * (DEPTH + 2)


def test_each_property_of_a_call_counts() -> None:
    calls = [
        Call(EIGHT, "all_reduce", 3),
        Call(EIGHT, "all_gather", 3),
        Call(EIGHT, "all_reduce", 4),
        Call(torch.zeros(9), "all_reduce", 3),
        Call(torch.zeros(8, dtype=torch.int32), "all_reduce", 3),
        Call(EIGHT, "all_reduce", 3, label="norms"),
        Call(EIGHT, "all_reduce", 3, identity="ring"),
    ]
    assert len({call_tag(each, 0) for each in calls}) == len(calls)


def test_more_collectives_than_there_are_turns() -> None:
    """Results stay right while tags come again, with many collectives under way at once."""
    count = 3 * TAG_PERIOD + 1

    def body(world: World) -> list[torch.Tensor]:
        collectives = Collectives(world)
        buffers = [torch.full((7,), float(n * (world.rank + 1))) for n in range(count)]
        handles = [collectives.all_reduce(b, bucket=n % 3) for n, b in enumerate(buffers)]
        for handle in handles:
            handle.wait()
        return buffers

    with late.open_worlds(3) as (members, _):
        for buffers in loopback.run(members, body):
            for n, buffer in enumerate(buffers):
                assert torch.equal(buffer, torch.full((7,), 6.0 * n))
