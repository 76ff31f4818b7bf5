"""All-reduces of partitions in rank 0's order, on workers that are threads of this process."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import wingbeat
import wingbeat_lab
from helpers.sums import TINY_MB, assert_same, given, made, step, trained_on, weights
from helpers.training import on
from helpers.waiting import until
from wingbeat import Strategy, parts
from wingbeat.engine.gradients.bucket import Bucket, Slot
from wingbeat.errors import PeerError
from wingbeat.schedules.events import Operation
from wingbeat.transport.failures import MAX_WAIT_FACTOR
from wingbeat_lab.bytescheduler import Partitioned
from wingbeat_lab.bytescheduler.exchange import PartitionedExchange
from wingbeat_lab.bytescheduler.order import MESSAGES, Partition, Reason

SIZE = 3
SHAPES = ((5, 3), (7,), (), (40, 2))


def buckets_of(world: Any, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Bucket]:
    """One bucket for each shape, the last of which forward needs first."""
    slots = [Slot(i, f"p{i}", torch.nn.Parameter(torch.ones(s))) for i, s in enumerate(shapes)]
    return [Bucket(i, [slot], world.size) for i, slot in enumerate(slots)]


def fill(buckets: Sequence[Bucket], rank: int, turn: int) -> None:
    for bucket in buckets:
        generator = torch.Generator().manual_seed(100 * turn + 10 * rank + bucket.index)
        bucket.flat.copy_(torch.randint(-9, 10, bucket.flat.shape, generator=generator))


def total(buckets: Sequence[Bucket], turn: int, size: int = SIZE) -> list[torch.Tensor]:
    wanted = [torch.zeros_like(bucket.flat) for bucket in buckets]
    for rank in range(size):
        fill(buckets, rank, turn)
        for each, bucket in zip(wanted, buckets, strict=True):
            each += bucket.flat
    return wanted


def planned(world: Any, partition: int, credit: int) -> tuple[PartitionedExchange, list[Bucket]]:
    exchange, buckets = PartitionedExchange(world, "ring", partition, credit), buckets_of(world)
    exchange.planned(buckets, buckets[::-1])
    return exchange, buckets


def record(exchange: PartitionedExchange) -> list[Partition]:
    """The partitions that this worker starts from now on."""
    started: list[Partition] = []
    begin = exchange._sums._begin

    def recorded(partitions: Sequence[Partition]) -> None:
        started.extend(partitions)
        begin(partitions)

    exchange._sums._begin = recorded  # type: ignore[method-assign]
    return started


@pytest.mark.parametrize(("partition", "credit"), [(16, 16), (16, 64), (40, 100), (4096, 4096)])
def test_every_bucket_has_the_sum_and_all_workers_start_in_one_order(
    partition: int, credit: int
) -> None:
    def body(world: Any) -> list[Partition]:
        exchange, buckets = planned(world, partition, credit)
        started = record(exchange)
        for turn in range(4):
            wanted = total(buckets, turn)
            fill(buckets, world.rank, turn)
            for bucket in buckets:
                exchange.start(Operation.ALL_REDUCE, bucket)
            for bucket in buckets[::-1]:
                bucket.settle()
            assert all(torch.equal(b.flat, w) for b, w in zip(buckets, wanted, strict=True))
        return started

    first, *others = on(SIZE, body)
    assert len(first) == len(set(first)) >= 4 * len(SHAPES)
    assert others == [first] * (SIZE - 1)


def test_partitions_of_the_bucket_that_forward_needs_first_overtake_others() -> None:
    """Rank 0's buckets are ready before the first all-reduce can end: rank 1 comes late."""
    ready = threading.Event()

    def body(world: Any) -> list[Partition]:
        exchange, buckets = planned(world, 16, 16)
        started = record(exchange)
        if world.rank == 1:
            assert ready.wait(20)
        for bucket in buckets:
            exchange.start(Operation.ALL_REDUCE, bucket)
        if world.rank == 0:
            until(lambda: not exchange._sums._calls)
            ready.set()
        for bucket in buckets:
            bucket.settle()
        return started

    first = on(SIZE, body)[0]
    assert [each.bucket for each in first[:2]] == [0, 3], "the first had begun"
    order = [each.bucket for each in first[1:]]
    assert order == sorted(order, reverse=True)


def test_buckets_may_change_between_iterations() -> None:
    def body(world: Any) -> None:
        exchange, buckets = planned(world, 16, 32)
        for turn, shapes in enumerate((SHAPES, SHAPES[:2], ((100,), *SHAPES))):
            if turn:
                buckets = buckets_of(world, shapes)
                exchange.planned(buckets, buckets)
            wanted = total(buckets, turn)
            fill(buckets, world.rank, turn)
            for bucket in buckets:
                exchange.start(Operation.ALL_REDUCE, bucket)
            for bucket in buckets:
                bucket.settle()
            assert all(torch.equal(b.flat, w) for b, w in zip(buckets, wanted, strict=True))

    on(SIZE, body)


def test_bf16_rounds_what_is_sent() -> None:
    def body(world: Any) -> torch.Tensor:
        exchange, buckets = planned(world, 16, 64)
        for bucket in buckets:
            bucket.flat.fill_(1.001)
            bucket.wire = torch.bfloat16
            exchange.start(Operation.ALL_REDUCE, bucket)
        for bucket in buckets:
            bucket.settle()
        return buckets[0].flat.clone()

    for found in on(SIZE, body):
        assert found.tolist() == [3.0] * len(found), "1.001 is 1 in bfloat16"


# -- failures -----------------------------------------------------------------------------


def sum_all(exchange: PartitionedExchange, buckets: Sequence[Bucket]) -> None:
    for bucket in buckets:
        exchange.start(Operation.ALL_REDUCE, bucket)
    for bucket in buckets:
        bucket.settle()


def failure(
    rank: int, act: Callable[[Any, PartitionedExchange, list[Bucket]], None], timeout: float = 20.0
) -> str:
    """What a worker raises that waits for its buckets, while rank 0 acts instead of starting."""

    all_planned = threading.Barrier(SIZE)

    def body(world: Any) -> str:
        exchange, buckets = planned(world, 16, 64)
        all_planned.wait(20)  # else `planned` raises, where the failure comes first
        if world.rank == 0:
            act(world, exchange, buckets)
            return ""
        with pytest.raises(PeerError) as caught:
            sum_all(exchange, buckets)
        with pytest.raises(PeerError):  # and so do later ones
            exchange.start(Operation.ALL_REDUCE, buckets[0])
        return str(caught.value)

    found = on(SIZE, body, timeout)[rank]
    assert "\n" not in found
    return found


def post(exchange: PartitionedExchange, record: Partition | Reason) -> None:
    kind, ids, payload = MESSAGES.pack(record)
    for peer in exchange._sums.mailbox.peers:
        exchange._sums.mailbox.post(peer, kind, payload, ids=ids)


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ([Partition(1, 0, 9, 0)], "partition 0 of bucket 9: there are 4 buckets"),
        ([Partition(1, 0, 0, 77)], "partition 77 of bucket 0, which has 4 partitions"),
        ([Partition(1, 0, 0, 1)] * 2, "partition 1 of bucket 0 is named twice"),
        ([Partition(1, 7, 0, 0)], "partition 0 of bucket 0 in round 7; round 0 is due"),
    ],
)
def test_a_broken_order_is_refused_and_names_its_sender(named: list[Partition], words: str) -> None:
    def act(_world: Any, exchange: PartitionedExchange, _buckets: list[Bucket]) -> None:
        for each in named:
            post(exchange, each)

    assert failure(1, act) == (
        f"rank 1: rank 0 sent a malformed message for the order of partitions: {words}"
    )


def test_an_order_from_another_worker_is_refused() -> None:
    done, all_planned = threading.Event(), threading.Barrier(SIZE)

    def body(world: Any) -> str:
        exchange, buckets = planned(world, 16, 64)
        all_planned.wait(20)
        if world.rank == 2:
            post(exchange, Partition(1, 0, 0, 0))
        if world.rank != 0:
            assert done.wait(20)
            return ""
        with pytest.raises(PeerError) as caught:
            sum_all(exchange, buckets[:1])
        done.set()
        return str(caught.value)

    found = on(SIZE, body)[0]
    assert found == (
        "rank 0: rank 2 sent a malformed message for the order of partitions: a message that only "
        "rank 0 sends"
    )


def test_a_failure_of_rank_0_is_passed_on_with_its_reason() -> None:
    def act(_world: Any, exchange: PartitionedExchange, _buckets: list[Bucket]) -> None:
        post(exchange, Reason(b"a\ndefect\xff"))

    assert failure(2, act) == "rank 2: rank 0 has failed: a?defect\ufffd"


def test_rank_0_reports_why_it_has_failed() -> None:
    def act(_world: Any, exchange: PartitionedExchange, _buckets: list[Bucket]) -> None:
        def defect() -> None:
            raise ValueError("a defect")

        exchange._sums.ask(defect)

    assert failure(1, act) == "rank 1: rank 0 has failed: ValueError: a defect"


def test_a_rank_0_that_has_left_is_named() -> None:
    def act(_world: Any, exchange: PartitionedExchange, _buckets: list[Bucket]) -> None:
        exchange._sums.close()

    found = failure(1, act)
    assert found.startswith("rank 1: rank 0 has left, and has not named the next partition of")


def test_a_rank_0_that_does_not_answer_is_named_after_the_timeout() -> None:
    """Threads have no process that could answer."""
    done = threading.Event()

    def body(world: Any) -> str:
        exchange, buckets = planned(world, 16, 64)
        if world.rank == 0:
            assert done.wait(20)
            return ""
        exchange.start(Operation.ALL_REDUCE, buckets[1])
        with pytest.raises(PeerError) as caught:
            buckets[1].settle()
        done.set()
        return str(caught.value)

    assert re.fullmatch(
        r"rank 1: rank 0 does not answer, and has not named the next partition of bucket 1 for "
        r"\d s: check that it runs, or increase the timeout: wingbeat.init\(timeout=...\)",
        on(2, body, 0.5)[1],
    )


def test_a_live_rank_0_is_awaited_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wingbeat_lab.bytescheduler.exchange.is_alive", lambda *_: True)
    done = threading.Event()
    timeout, ahead = 10.0, [0.0]

    def body(world: Any) -> str:
        exchange, buckets = planned(world, 16, 64)
        if world.rank == 0:
            assert done.wait(20)
            return ""
        sums = exchange._sums
        sums.clock = lambda: time.monotonic() + ahead[0]
        exchange.start(Operation.ALL_REDUCE, buckets[1])
        until(lambda: sums._wait is not None)
        before, ahead[0] = sums._checked_at, (MAX_WAIT_FACTOR - 1) * timeout
        until(lambda: sums._checked_at > before + ahead[0])
        assert not sums._sums[1].done()
        ahead[0] += 2 * timeout
        with pytest.raises(PeerError) as caught:
            buckets[1].settle()
        done.set()
        return str(caught.value)

    assert "rank 0 is alive, but the next partition of bucket 1" in on(2, body, timeout)[1]


def test_sums_that_others_need_are_completed_before_the_end() -> None:
    """A worker whose script ends does not wait for its last sums, which others still need."""

    def body(world: Any) -> list[torch.Tensor]:
        exchange, buckets = planned(world, 16, 16)
        fill(buckets, world.rank, 0)
        for bucket in buckets:
            exchange.start(Operation.ALL_REDUCE, bucket)
        if world.rank == 2:
            for bucket in buckets:
                bucket.settle()
        world.close()
        return [bucket.flat for bucket in buckets]

    for found in on(SIZE, body):
        world = type("World", (), {"size": SIZE})
        wanted = total(buckets_of(world), 0)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


# -- training -----------------------------------------------------------------------------

OPTIONS: dict[str, Any] = {
    "each parameter": wingbeat_lab.ByteScheduler(partition_mb=TINY_MB / 8, credit=1),
    "usual sizes": wingbeat_lab.ByteScheduler(),
    "buckets": wingbeat_lab.ByteScheduler(mb=TINY_MB, partition_mb=TINY_MB / 4, credit=2),
    "mesh": wingbeat_lab.ByteScheduler(partition_mb=TINY_MB / 8, topology="mesh"),
    "in backward": Strategy(
        plan="none", exchange=Partitioned(partition_mb=TINY_MB / 8), schedule="wfbp"
    ),
    "tuned": Strategy(
        plan=parts.TunedBuckets(
            search="grid", mb=TINY_MB, min_mb=TINY_MB / 2, max_mb=8 * TINY_MB, trials=3, steps=1
        ),
        exchange=Partitioned(partition_mb=TINY_MB / 8),
        schedule="served",
    ),
}


@pytest.mark.parametrize("strategy", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("size", [1, 4])
def test_weights_are_those_of_one_process_with_all_batches(strategy: Any, size: int) -> None:
    steps = 8

    def body(world: Any) -> dict[str, torch.Tensor]:
        model, optimizer = made(world, strategy)
        for number in range(steps):
            step(model, optimizer, given(number, world.rank))
        model, optimizer = wingbeat.release(model, optimizer)
        return weights(model)

    wanted = trained_on([given(n, r) for n in range(steps) for r in range(size)], size)
    for found in on(size, body):
        assert_same(found, wanted)


def test_updates_are_made_when_forward_needs_them() -> None:
    """No wait for sums in the step: the global barrier is crossed."""
    gate = threading.Event()

    def body(world: Any) -> dict[str, torch.Tensor]:
        model, optimizer = made(world, OPTIONS["each parameter"])
        step(model, optimizer, given(0, world.rank))
        if world.rank == 1:
            assert gate.wait(20)
        step(model, optimizer, given(1, world.rank))  # of rank 0 before rank 1 has begun
        gate.set()
        wingbeat.release(model, optimizer)
        return weights(model)

    wanted = trained_on([given(n, r) for n in range(2) for r in range(2)], 2)
    for found in on(2, body):
        assert_same(found, wanted)
