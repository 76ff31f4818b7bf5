"""What every exchange keeps to; a new one is one line in `EXCHANGES`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from helpers import late
from helpers.training import on
from wingbeat.collectives import Collectives
from wingbeat.compression import Half, LowRank, Sketch, TopK
from wingbeat.engine.gradients.bucket import Bucket, Slot
from wingbeat.engine.gradients.compression import Compression
from wingbeat.errors import PeerError
from wingbeat.exchanges.collective import CollectiveExchange, Exchange
from wingbeat.schedules.events import Operation
from wingbeat.transport import loopback
from wingbeat_lab.ako.partial import PartialExchange
from wingbeat_lab.ako.unsent import UnsentGradients
from wingbeat_lab.bytescheduler.exchange import PartitionedExchange

SHAPES = ((40, 30), (7,), (), (65, 3))
SIZE = 3


@dataclass
class Made:
    """One worker's exchange, and what a bucket has to be given before it starts."""

    exchange: Exchange
    compression: Compression


def by_collectives(topology: str, wire: Any) -> Callable[[Any, list[Slot]], Made]:
    def make(world: Any, slots: list[Slot]) -> Made:
        collectives = Collectives(world, topology)
        compression = Compression(wire, slots, collectives)
        return Made(CollectiveExchange(collectives, compression), compression)

    return make


def in_parts(world: Any, slots: list[Slot]) -> Made:
    """All of a bucket is one part, so that everything comes at once."""
    unsent = UnsentGradients("", slots, Collectives(world, "mesh"))
    return Made(PartialExchange(Collectives(world, "mesh"), unsent, 1), unsent)


def by_priority(world: Any, slots: list[Slot]) -> Made:
    """Several partitions of a bucket, of which some are in flight at a time."""
    compression = Compression("", slots, Collectives(world, "ring"))
    return Made(PartitionedExchange(world, "ring", 1 << 10, 1 << 11), compression)


@dataclass
class Kind:
    """How to make one; ``error`` is what a sum may be off by, relative to its norm.

    ``same`` says whether all workers get the same bits.
    """

    make: Callable[[Any, list[Slot]], Made]
    error: float
    same: bool = True


EXCHANGES = {
    "ring": Kind(by_collectives("ring", ""), 1e-6),
    "mesh": Kind(by_collectives("mesh", ""), 1e-6),
    "doubling": Kind(by_collectives("doubling", ""), 1e-6),
    "bcube": Kind(by_collectives("bcube", ""), 1e-6),
    "bf16": Kind(by_collectives("ring", "bfloat16"), 2e-2),
    "half": Kind(by_collectives("ring", Half(auto_disable=False)), 2e-3),
    "sketch": Kind(by_collectives("ring", Sketch(auto_disable=False)), 5e-2),
    "all of top-k": Kind(by_collectives("ring", TopK(density=1.0, auto_disable=False)), 1e-6),
    "low rank": Kind(by_collectives("ring", LowRank(rank=30, auto_disable=False)), 2e-1),
}

WHOLE = {
    **EXCHANGES,
    "in parts": Kind(in_parts, 1e-6, same=False),
    "by priority": Kind(by_priority, 1e-6),
}
"""Those that have no halves are among them."""

every = pytest.mark.parametrize("kind", EXCHANGES.values(), ids=EXCHANGES)
whole = pytest.mark.parametrize("kind", WHOLE.values(), ids=WHOLE)


def gradients(rank: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * seed + rank)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def total(size: int, seed: int = 0) -> torch.Tensor:
    each = [torch.cat([g.reshape(-1) for g in gradients(rank, seed)]) for rank in range(size)]
    return torch.stack(each).sum(0)


def filled(world: Any, kind: Kind, seed: int = 0) -> tuple[Made, Bucket]:
    """A bucket that is ready to travel, of ones in parameters and known gradients."""
    slots = [Slot(i, f"p{i}", torch.nn.Parameter(torch.ones(s))) for i, s in enumerate(SHAPES)]
    bucket = Bucket(0, slots, world.size)
    made = kind.make(world, slots)
    made.exchange.planned([bucket], [bucket])
    fill(bucket, world.rank, seed)
    bucket.wire = made.compression.launching(bucket)
    return made, bucket


def fill(bucket: Bucket, rank: int, seed: int = 0) -> None:
    for slot, grad in zip(bucket.slots, gradients(rank, seed), strict=True):
        slot.view.copy_(grad)
        slot.used = True
    bucket.write_tail(127, rank)


def assert_close(found: torch.Tensor, wanted: torch.Tensor, error: float) -> None:
    assert (found - wanted).norm() <= error * wanted.norm()


@whole
def test_an_all_reduce_brings_the_sum_to_all_with_the_same_bits(kind: Kind) -> None:
    def body(world: Any) -> torch.Tensor:
        made, bucket = filled(world, kind)
        made.exchange.start(Operation.ALL_REDUCE, bucket)
        bucket.settle()
        assert bucket.counts.tolist() == [128] * SIZE, "steps are not rounded"
        assert bucket.flags.tolist() == [SIZE] * len(SHAPES), "who used what is not rounded"
        return bucket.flat[: bucket.numel].clone()

    first, *others = on(SIZE, body)
    for found in (first, *others):
        assert_close(found, total(SIZE), kind.error)
    assert not kind.same or all(torch.equal(first, other) for other in others)


@every
@pytest.mark.parametrize("chained", [False, True])
def test_a_reduce_scatter_and_an_all_gather_make_an_all_reduce(kind: Kind, chained: bool) -> None:
    def body(world: Any) -> torch.Tensor:
        made, bucket = filled(world, kind)
        made.exchange.start(Operation.REDUCE_SCATTER, bucket)
        if not chained:
            bucket.settle()
        made.exchange.start(Operation.ALL_GATHER, bucket, chained=chained)
        bucket.settle()
        assert bucket.flags.tolist() == [SIZE] * len(SHAPES)
        return bucket.flat[: bucket.numel].clone()

    first, *others = on(SIZE, body)
    assert_close(first, total(SIZE), kind.error)
    assert all(torch.equal(first, other) for other in others)


@every
def test_each_worker_owns_a_block_and_a_reduce_scatter_makes_it_whole(kind: Kind) -> None:
    def body(world: Any) -> tuple[Any, torch.Tensor]:
        made, bucket = filled(world, kind)
        made.exchange.start(Operation.REDUCE_SCATTER, bucket)
        assert bucket.handle is not None
        bucket.handle.wait_received()
        own = bucket.owned(world.rank)
        return own, bucket.flat[own.start : own.stop].clone()

    results = on(SIZE, body)
    spans = [own for own, _ in results]
    assert [s.start for s in spans] == [0, *(s.stop for s in spans[:-1])], "no gap, no overlap"
    whole = torch.cat([part for _, part in results])
    assert_close(whole[: total(SIZE).numel()], total(SIZE), kind.error)


@every
def test_parameters_are_gathered_as_they_are_whatever_gradients_travel_as(kind: Kind) -> None:
    def body(world: Any) -> torch.Tensor:
        made, bucket = filled(world, kind)
        made.exchange.start(Operation.REDUCE_SCATTER, bucket)
        bucket.settle()
        own = bucket.owned(world.rank)
        bucket.flat[own.start : own.stop] = torch.arange(own.start, own.stop) * 1.000001
        made.exchange.start(Operation.ALL_GATHER_PARAMETERS, bucket)
        bucket.settle()
        return bucket.flat.clone()

    for found in on(SIZE, body):
        assert torch.equal(found, torch.arange(found.numel()) * 1.000001)


@every
def test_operations_keep_their_order_and_the_handle_is_that_of_the_last(kind: Kind) -> None:
    def body(world: Any) -> list[torch.Tensor]:
        found = []
        made, bucket = filled(world, kind)
        for seed in range(3):
            fill(bucket, world.rank, seed)
            bucket.wire = made.compression.launching(bucket)
            made.exchange.start(Operation.REDUCE_SCATTER, bucket)
            first = bucket.handle
            made.exchange.start(Operation.ALL_GATHER, bucket, chained=True)
            assert bucket.handle is not first
            bucket.settle()
            found.append(bucket.flat[: bucket.numel].clone())
        return found

    results = on(SIZE, body)
    for seed in range(3):
        # What was rounded away comes with the next.
        assert_close(results[0][seed], total(SIZE, seed), 2 * kind.error)
        assert all(torch.equal(results[0][seed], other[seed]) for other in results)


@whole
def test_one_worker_alone_keeps_its_gradients(kind: Kind) -> None:
    def body(world: Any) -> torch.Tensor:
        made, bucket = filled(world, kind)
        made.exchange.start(Operation.ALL_REDUCE, bucket)
        bucket.settle()
        return bucket.flat[: bucket.numel].clone()

    assert_close(on(1, body)[0], total(1), kind.error)


@whole
def test_a_buffer_is_read_until_it_has_been_waited_for(kind: Kind) -> None:
    """On a link that reads the sender's memory late, as sockets do."""

    def body(world: Any) -> torch.Tensor:
        made, bucket = filled(world, kind)
        made.exchange.start(Operation.ALL_REDUCE, bucket)
        bucket.settle()
        found = bucket.flat[: bucket.numel].clone()
        bucket.flat.fill_(7.0)
        return found

    with late.open_worlds(SIZE) as (members, _):
        for found in loopback.run(members, body):
            assert_close(found, total(SIZE), kind.error)


@whole
def test_a_lost_worker_is_named(kind: Kind) -> None:
    board = loopback.Switchboard()
    members = loopback.worlds(SIZE, switchboard=board, timeout=0.5)
    ready = threading.Barrier(SIZE)

    def body(world: Any) -> str:
        made, bucket = filled(world, kind)
        ready.wait(timeout=10)  # a worker that is lost earlier fails the plan, not the exchange
        if world.rank == 2:
            board.fail(2)
            return ""

        def exchanged() -> None:
            made.exchange.start(Operation.ALL_REDUCE, bucket)
            bucket.settle()

        with pytest.raises(PeerError, match="rank 2"):
            exchanged()
        return "told"

    assert loopback.run(members, body) == ["told", "told", ""]
