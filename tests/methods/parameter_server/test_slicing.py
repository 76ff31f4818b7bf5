"""Partitioning of buckets: each element once, evenly; and the paper's counts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.methods.parameter_server.slicing import Slice, partition_buckets, place_buckets
from wingbeat_lab.paced.profile import load_profile

SIZES = st.lists(st.integers(0, 3000) | st.integers(0, 10**7), max_size=12)
THRESHOLDS = st.none() | st.integers(20_000, 10**7)


def assert_once(sizes: list[int], slices: tuple[Slice, ...]) -> None:
    """Numbered from 0 on, bucket by bucket, from element to element, and none of them empty."""
    assert [each.number for each in slices] == list(range(len(slices)))
    found: dict[int, int] = dict.fromkeys(range(len(sizes)), 0)
    for each in slices:
        assert each.start == found[each.bucket], "no gap, no overlap"
        assert each.stop - each.start == len(each) > 0
        found[each.bucket] = each.stop
    assert found == dict(enumerate(sizes))


@given(SIZES, st.integers(1, 9), THRESHOLDS, st.integers(1, 5000))
def test_partition_buckets_covers_each_element_once(
    sizes: list[int], servers: int, threshold: int | None, smallest: int
) -> None:
    slices = partition_buckets(sizes, servers, threshold, smallest)
    assert_once(sizes, slices)
    assert all(0 <= each.server < servers for each in slices)
    if threshold is not None:
        assert all(len(each) <= threshold for each in slices)


@given(SIZES, st.integers(1, 9), THRESHOLDS, st.integers(1, 5000))
def test_partition_buckets_makes_even_shards_of_minimum_size(
    sizes: list[int], servers: int, threshold: int | None, smallest: int
) -> None:
    slices = partition_buckets(sizes, servers, threshold, smallest)
    for bucket, numel in enumerate(sizes):
        shards: dict[int, list[int]] = {}
        for each in slices:
            if each.bucket == bucket:
                shards.setdefault(each.server, []).append(len(each))
        lengths = [sum(pieces) for pieces in shards.values()]
        if not numel:
            assert not lengths
            continue
        assert max(lengths) - min(lengths) <= 1
        assert len(lengths) == min(servers, max(1, numel // smallest))
        assert min(lengths) >= min(smallest, numel)
        for pieces, length in zip(shards.values(), lengths, strict=True):
            assert max(pieces) - min(pieces) <= 1
            assert len(pieces) == (1 if threshold is None else math.ceil(length / threshold))


@given(SIZES, st.integers(1, 9), st.integers(1, 5000))
def test_partition_buckets_balances_servers(sizes: list[int], servers: int, smallest: int) -> None:
    load = [0] * servers
    for each in partition_buckets(sizes, servers, None, smallest):
        load[each.server] += len(each)
    # A shard that is not on every server has less than 2 * smallest; even ones differ by one.
    assert max(load) - min(load) <= 2 * smallest + len(sizes)


def test_partition_buckets_places_small_buckets_on_least_loaded_server() -> None:
    slices = partition_buckets([100, 10, 20, 5], 3, None, smallest=100)
    assert [each.server for each in slices] == [0, 1, 2, 1]


@given(SIZES, st.integers(1, 9), st.integers(100_000, 10**7))
def test_place_buckets_is_round_robin(sizes: list[int], servers: int, limit: int) -> None:
    slices = place_buckets(sizes, servers, limit)
    assert_once(sizes, slices)
    assert all(each.server == each.bucket % servers for each in slices)
    assert all(len(each) <= limit for each in slices)


WEIGHTS = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=4).map(
    lambda found: tuple(each / sum(found) for each in found)
)


@given(SIZES, st.integers(1, 9), THRESHOLDS, st.integers(1, 5000), WEIGHTS)
def test_partition_buckets_assigns_one_link_per_element(
    sizes: list[int],
    servers: int,
    threshold: int | None,
    smallest: int,
    weights: tuple[float, ...],
) -> None:
    """And links change nothing of which server has it, nor are parts smaller than told."""
    slices = partition_buckets(sizes, servers, threshold, smallest, weights)
    assert_once(sizes, slices)
    assert all(0 <= each.link < len(weights) for each in slices)
    shards: list[dict[tuple[int, int], list[int]]] = [{}, {}]
    for found, made in zip(
        shards, (slices, partition_buckets(sizes, servers, None, smallest)), strict=True
    ):
        for each in made:
            span = found.setdefault((each.bucket, each.server), [each.start, each.stop])
            span[1] = each.stop
    assert shards[0] == shards[1]
    parts: dict[tuple[int, int, int], int] = {}
    for each in slices:
        key = each.bucket, each.server, each.link
        parts[key] = parts.get(key, 0) + len(each)
    for (bucket, server, _), numel in parts.items():
        start, stop = shards[0][bucket, server]
        assert numel >= min(smallest - 1, stop - start)


@pytest.mark.parametrize("weights", [(0.5, 0.5), (0.1, 0.9), (0.2, 0.5, 0.3)])
@pytest.mark.parametrize("whole", [False, True])
def test_links_are_loaded_in_proportion_to_weights(whole: bool, weights: tuple[float, ...]) -> None:
    sizes = [each.numel for layer in load_profile("resnet50").layers for each in layer.parameters]
    slices = place_buckets(sizes, 4, K * K, weights) if whole else partition_buckets(
        sizes, 4, K * K, weights=weights
    )  # fmt: skip
    for servers in [range(4)] if whole else [[server] for server in range(4)]:
        load = [0] * len(weights)
        for each in slices:
            if each.server in servers:
                load[each.link] += len(each)
        parts = [each / sum(load) for each in load]
        assert parts == pytest.approx(weights, abs=0.03 if whole else 0.005)


def test_small_shard_uses_least_loaded_link() -> None:
    slices = partition_buckets([100] * 6, 1, None, 100, (0.75, 0.25))
    assert [each.link for each in slices] == [0, 0, 0, 1, 0, 0]
    slices = partition_buckets([1000, 100, 100, 100], 1, None, 500, (0.5, 0.5))
    assert [(each.start, each.stop, each.link) for each in slices] == [
        (0, 500, 0), (500, 1000, 1), (0, 100, 0), (0, 100, 1), (0, 100, 0),
    ]  # fmt: skip


K = 1024


@pytest.mark.parametrize(
    ("smallest", "unit", "counts"),
    [
        # The paper has 320, 440 and 680: 120 and then 240 more.
        (1, 1, [408, 520, 808]),  # elements
        (1, 4, [808, 1344, 2432]),  # bytes of float32
        (4096, 1, [268, 380, 668]),  # elements, and small tensors on fewer servers
        (4096, 4, [668, 1204, 2292]),
    ],
)
def test_partition_buckets_of_vgg19_matches_paper_counts(
    smallest: int, unit: int, counts: list[int]
) -> None:
    """Section V-D counts them at 1024K, 512K and 256K: only elements come anywhere near."""
    sizes = [each.numel for layer in load_profile("vgg19").layers for each in layer.parameters]
    assert len(sizes) == 38
    found = [
        len(partition_buckets(sizes, 8, threshold * K // unit, smallest=smallest))
        for threshold in (1024, 512, 256)
    ]
    assert found == counts
    near = all(abs(a / b - 1) < 0.3 for a, b in zip(found, (320, 440, 680), strict=True))
    assert near == (unit == 1)
