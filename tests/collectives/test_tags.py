"""Tags: messages of collectives that do not match never meet."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import pytest
import torch

import wingbeat
from helpers import late
from wingbeat.collectives import Collectives, executor
from wingbeat.collectives.executor import CHUNKS_PER_TAG, LABELS, TAG_PERIOD, group_tag
from wingbeat.collectives.program import DEPTH
from wingbeat.transport import loopback
from wingbeat.transport.link import BITS_BELOW, TAG_BITS
from wingbeat.transport.world import World

base_tag = functools.partial(executor.base_tag, dtype=torch.float32)
OPERATIONS = ("reduce_scatter", "all_gather", "all_reduce")


def _tags(turn: int) -> list[int]:
    """One of every operation on 32 buckets, and one small exchange."""
    found = [base_tag(op, b, 64, "", turn) for op, b in itertools.product(OPERATIONS, range(32))]
    return [*found, base_tag("broadcast:0", -1, 64, "tensors", turn)]


def test_neither_operations_nor_buckets_nor_turns_share_a_tag() -> None:
    found = [tag for turn in range(TAG_PERIOD) for tag in _tags(turn)]
    assert len(set(found)) == len(found)
    # Nor do their chunks, which count on from there.
    assert all(tag % CHUNKS_PER_TAG == 0 for tag in found)


def test_tags_repeat_and_stay_in_their_channel() -> None:
    assert _tags(TAG_PERIOD + 3) == _tags(3)
    highest = max(tag for turn in range(2 * TAG_PERIOD) for tag in _tags(turn)) + CHUNKS_PER_TAG - 1
    assert highest < 1 << BITS_BELOW


def test_tags_of_collectives_in_flight_differ() -> None:
    """Begun here and begun at a peer that is as far ahead as it can be."""
    assert TAG_PERIOD > 2 * (DEPTH + 2)


@pytest.mark.parametrize("what", ["broadcast:0", "all_gather", "all_reduce"])
def test_small_exchange_never_has_the_tag_of_a_bucket(what: str) -> None:
    control = {base_tag(what, -1, 8 * n, "label", 0) for n in range(200)}
    assert not control & set(_tags(0)[:-1])


def test_size_and_root_of_small_exchanges_count() -> None:
    """They share five bits, so that two of them may meet, but not all."""
    sizes = {base_tag("all_gather", -1, 8 * n, "norms", 0) for n in range(400)}
    roots = {base_tag(f"broadcast:{n}", -1, 8, "tensors", 0) for n in range(400)}
    assert len(sizes) == len(roots) == 32


def test_size_and_dtype_of_buckets_count() -> None:
    sizes = {base_tag("all_reduce", 3, 8 * n, "", 0) for n in range(100)}
    dtypes = (torch.float32, torch.int32, torch.bfloat16, torch.float64, torch.uint8)
    assert len(sizes) == 4
    assert len({executor.base_tag("all_reduce", 3, 8, "", 0, dtype) for dtype in dtypes}) > 1


def test_every_label_with_a_number_is_in_use() -> None:
    root = Path(wingbeat.__file__).parent
    sources = [path for path in root.rglob("*.py") if path != Path(executor.__file__)]
    code = "".join(path.read_text(encoding="utf-8") for path in sources)
    assert [label for label in LABELS if f'"{label}"' not in code] == []


def test_tags_fit_below_the_channel() -> None:
    labels = [*LABELS, "anything else"]
    found = {
        base_tag("all_gather", -1, n, label, TAG_PERIOD - 1) for n in range(400) for label in labels
    }
    assert (
        max(found | {base_tag("all_reduce", 127, 8, "", TAG_PERIOD - 1)}) + CHUNKS_PER_TAG
        <= 1 << BITS_BELOW
    )


def test_small_exchanges_with_different_labels_differ_at_any_size() -> None:
    found = {
        label: {base_tag("all_gather", -1, 8 * n, label, 0) for n in range(100)}
        for label in (*LABELS, "anything else")
    }
    assert sum(map(len, found.values())) == len(set().union(*found.values()))


def test_group_tags_differ_by_call_and_turn_and_fit() -> None:
    calls = [f"all_reduce {n}" for n in range(300)]
    found = {group_tag(call, turn) for call in calls for turn in range(TAG_PERIOD)}
    assert len(found) >= 299 * TAG_PERIOD
    assert all(tag >= 0 and tag + CHUNKS_PER_TAG <= 1 << TAG_BITS for tag in found)
    assert {group_tag(call, TAG_PERIOD) for call in calls} < found


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
