"""Sums of factors over links: the same bits everywhere, in any pace, and errors that are told."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from helpers import late
from wingbeat.codecs.lowrank import Factors, Matrix
from wingbeat.collectives import Collectives, Handle
from wingbeat.collectives.encoded import FactoredSum
from wingbeat.errors import PeerError
from wingbeat.transport import loopback
from wingbeat.transport.world import World

ROWS, COLS, RANK = 50, 40, 2
LENGTH = ROWS * COLS + 5


def factors(size: int, name: str = "a", residual: Any = None) -> Factors:
    return Factors([Matrix(name, 0, ROWS, COLS, RANK)], LENGTH, size, residual, {})


def gradient(seed: int) -> torch.Tensor:
    return torch.randn(LENGTH, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("size", "interfaces"), [(2, 1), (3, 2), (4, 1), (5, 2)])
@pytest.mark.parametrize("topology", ["ring", "mesh", "doubling"])
def test_factored_sum_is_equal_everywhere_and_residuals_hold_the_error(
    size, interfaces, topology
) -> None:
    """Several buckets at once, over several steps."""
    buckets, steps = 5, 2

    def body(world: World) -> Any:
        collectives = Collectives(world, topology)
        collectives.open_second()
        kept = [torch.zeros(LENGTH) for _ in range(buckets)]
        each = [factors(size, str(i), kept[i]) for i in range(buckets)]
        total = [torch.zeros(LENGTH) for _ in range(buckets)]
        for step in range(steps):
            seeds = [100 * step + 10 * i + world.rank for i in range(buckets)]
            buffers = [gradient(seed) for seed in seeds]
            handles = [
                collectives.all_reduce_factors(buffer, own, bucket=i)
                for i, (buffer, own) in enumerate(zip(buffers, each, strict=True))
            ]
            for handle in reversed(handles):  # in any order
                handle.wait()
                handle.wait_received()
            for whole, buffer in zip(total, buffers, strict=True):
                whole += buffer
        return total, kept

    with late.open_worlds(size, interfaces) as (members, _):
        results = loopback.run(members, body)
    for bucket in range(buckets):
        sums = [total[bucket] for total, _ in results]
        assert all(torch.equal(one, sums[0]) for one in sums)
        left = torch.stack([kept[bucket] for _, kept in results]).sum(0)
        seeds = [100 * s + 10 * bucket + r for s in range(steps) for r in range(size)]
        given = torch.stack([gradient(seed) for seed in seeds]).sum(0)
        torch.testing.assert_close(sums[0] + left, given, rtol=1e-4, atol=1e-4)


def test_single_worker_loses_nothing() -> None:
    [world] = loopback.worlds(1)
    buffer = gradient(0)
    collectives = Collectives(world)
    collectives.open_second()
    collectives.all_reduce_factors(buffer, factors(1)).wait()
    assert torch.equal(buffer, gradient(0))
    world.close()


def test_second_wait_leaves_the_buffer_unchanged() -> None:
    def body(world: World) -> bool:
        buffer = gradient(world.rank)
        collectives = Collectives(world)
        collectives.open_second()
        handle = collectives.all_reduce_factors(buffer, factors(2))
        handle.wait()
        buffer.fill_(7.0)
        handle.wait()
        return bool((buffer == 7.0).all())

    with late.open_worlds(2) as (members, _):
        assert loopback.run(members, body) == [True, True]


def test_lost_peer_is_named_by_every_wait_and_callback() -> None:
    first, second = loopback.worlds(2, timeout=0.3)
    opened = threading.Thread(target=lambda: Collectives(second).open_second())
    opened.start()
    collectives = Collectives(first)
    collectives.open_second()
    opened.join()
    handle = collectives.all_reduce_factors(gradient(0), factors(2), bucket=4)
    told = threading.Event()
    handle.add_done_callback(lambda _: told.set())
    for wait in (handle.wait, handle.wait_received, handle.wait):
        with pytest.raises(PeerError, match="rank 1 failed during all-reduce of bucket 4"):
            wait()
    assert told.wait(10)
    assert handle.done()
    late_one = threading.Event()
    handle.add_done_callback(lambda _: late_one.set())
    assert late_one.is_set()


def test_different_initial_factors_raise() -> None:
    def body(world: World) -> str:
        collectives = Collectives(world)
        collectives.open_second()
        own = factors(2)
        if world.rank == 1:
            own.starts[0].neg_()
            own.starts[0][0] = 3.0
        handle = collectives.all_reduce_factors(gradient(0), own, bucket=1)
        with pytest.raises(PeerError) as caught:
            handle.wait()
        return str(caught.value)

    with late.open_worlds(2) as (members, _):
        for rank, said in enumerate(loopback.run(members, body)):
            assert said == (
                f"rank {rank}: bucket 1: the workers' low-rank factors began differently: load the "
                "optimizer's state on all workers or on none"
            )


def test_failure_between_the_sums_is_raised_by_wait() -> None:
    summed = FactoredSum(factors(1), gradient(0), "rank 0: bucket 2")
    called: list[Handle] = []
    summed.add_done_callback(called.append)

    def broken(_: torch.Tensor) -> Handle:
        raise MemoryError("none left")

    summed.start_second(Handle([]), broken)
    assert called == [summed]
    with pytest.raises(PeerError, match="bucket 2 failed between its two sums: MemoryError"):
        summed.wait()
