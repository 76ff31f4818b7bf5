"""Partitions in virtual time: priorities, credit, and the time that the order takes."""

from __future__ import annotations

import pytest

from wingbeat import AllReduce, Strategy
from wingbeat.simulator import Links, Model, Run, TimedLayer, Work, simulate
from wingbeat.types import Layout, TensorSpec
from wingbeat_lab import ByteScheduler, paced

FREE = Work(
    chunk_s=0.0, wire_s_per_byte=0.0, add_s_per_byte=0.0, fill_s_per_byte=0.0,
    update_s_per_byte=0.0, message_s=0.0,
)  # fmt: skip
LINKS = Links(bytes_per_s=100e6, latency_s=0.0)
MB = 1 << 20


def layers(numel: tuple[int, ...], forward_s: float, backward_s: float) -> Model:
    """Layers of one tensor each, in the order of forward."""
    return Model(
        tuple(TimedLayer(forward_s, backward_s, (n,)) for n in range(len(numel))),
        tuple(TensorSpec(f"t{n}", (size,), "float32", 4) for n, size in enumerate(numel)),
    )


def run(model: Model, strategy: Strategy, workers: int = 4, **options: object) -> Run:
    given = {"links": LINKS, "work": FREE, "iterations": 4} | options
    return simulate(model, strategy, workers, **given)  # type: ignore[arg-type]


def all_reduce_s(nbytes: float, workers: int = 4) -> float:
    return 2 * (workers - 1) / workers * nbytes / LINKS.bytes_per_s


def test_iteration_is_as_long_as_its_all_reduces_where_these_dominate() -> None:
    """The next forward runs under sums: nothing else is exposed."""
    model = layers((4 * MB, 4 * MB, 4 * MB), 0.02, 0.04)
    made = run(model, ByteScheduler(partition_mb=1, credit=2))
    # The first layer's gradient is the last, and nothing is sent before the last layer's.
    least = all_reduce_s(48 * MB)
    assert least <= made.median_s <= least + 0.02 + 0.04 + all_reduce_s(4 * MB)


def test_a_small_first_layer_does_not_wait_for_a_large_last_one() -> None:
    """In order of readiness the first layer's sum is the last; by priority it overtakes."""
    model = layers((MB // 4, 16 * MB), 0.3, 0.01)
    small, large = all_reduce_s(MB), all_reduce_s(64 * MB)
    assert large > 0.6
    overtaken = run(model, ByteScheduler(partition_mb=1, credit=1))
    whole = run(model, ByteScheduler(partition_mb=64, credit=1))
    # Forward of the small layer hides 0.3 s of the large one's sum, unless it waits for all of it.
    assert whole.median_s == pytest.approx(0.01 + large + small + 0.6, rel=0.02)
    assert overtaken.median_s == pytest.approx(0.01 + large + small + 0.3, rel=0.05)


@pytest.mark.parametrize("credit", [1, 4, 16])
def test_credit_delays_an_urgent_bucket_by_what_is_in_flight(credit: int) -> None:
    model = layers((MB // 4, 64 * MB), 0.0, 0.01)
    made = run(model, ByteScheduler(partition_mb=1, credit=credit), iterations=3)
    begun, updated = (
        next(t for t, _, what, bucket in made.trace if (what, bucket) == (each, 1))
        for each in ("all_reduce", "update")
    )
    in_flight = all_reduce_s(credit * MB)
    assert updated - begun == pytest.approx(
        in_flight + all_reduce_s(MB), abs=1.5 * all_reduce_s(MB)
    )


def test_the_latency_of_a_name_passes_beside_that_of_the_first_half() -> None:
    model = layers((16 * MB,), 0.0, 0.0)
    slow = Links(bytes_per_s=100e6, latency_s=1e-3)
    strategies = [ByteScheduler(partition_mb=mb, credit=1) for mb in (1, 64)]
    many, one = (run(model, each, links=slow, workers=2).median_s for each in strategies)
    # One at a time, and an all-reduce of two workers has two latencies. The other worker starts
    # when it has the name, which is when the first chunk of rank 0 arrives.
    assert many - one == pytest.approx(63 * 2e-3, rel=0.05)


def test_rank_0_sends_each_name_to_each_worker() -> None:
    model = layers((16 * MB,), 0.0, 0.0)
    strategy, work = ByteScheduler(partition_mb=1, credit=1), Work(message_s=1e-3, chunk_s=0.0)
    free = Work(message_s=0.0, chunk_s=0.0)
    costs = [
        run(model, strategy, workers, work=work).median_s
        - run(model, strategy, workers, work=free).median_s
        for workers in (2, 6)
    ]
    assert costs[0] == pytest.approx(64 * 1e-3, rel=0.2)
    assert costs[1] - costs[0] == pytest.approx(64 * 4e-3, rel=0.2)


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_one_host_represents_all(hosts: int) -> None:
    model = paced.simulator_model(paced.parse("paced:resnet50@0.02"))
    layout = Layout.even(hosts, 4 // hosts)
    strategy = ByteScheduler(partition_mb=0.05)
    alone, all_of_them = (run(model, strategy, layout=layout, slow=slow) for slow in ({}, {0: 1.0}))
    assert alone.median_s == pytest.approx(all_of_them.median_s, rel=0.02)
    assert alone.bytes_per_host == pytest.approx(all_of_them.bytes_per_host, rel=1e-6)


def test_a_slow_worker_delays_all() -> None:
    model = paced.simulator_model(paced.parse("paced:resnet50@0.02"))
    usual, slow = (run(model, ByteScheduler(), slow=slow) for slow in ({}, {2: 2.0}))
    assert slow.median_s > 1.5 * usual.median_s


def test_equal_arguments_give_equal_runs() -> None:
    model = paced.simulator_model(paced.parse("paced:resnet50@0.05"))
    first, second = (run(model, ByteScheduler(partition_mb=0.1), slow={1: 1.1}) for _ in range(2))
    assert first == second


def test_bytes_are_those_of_whole_all_reduces() -> None:
    model = paced.simulator_model(paced.parse("paced:resnet50@0.05"))
    # Above 16 workers: fewer exchange small buffers in single rounds, which send more.
    partitioned, whole = (
        run(model, each, workers=17)
        for each in (ByteScheduler(partition_mb=0.1), AllReduce(plan="none"))
    )
    assert partitioned.bytes_per_host == pytest.approx(whole.bytes_per_host, rel=0.01)
