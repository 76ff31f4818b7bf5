"""The contract of every collective, on every topology, dtype, size and number of workers."""

from __future__ import annotations

import time

import pytest
import torch

from helpers import late
from wingbeat.collectives import Collectives
from wingbeat.collectives.executor import Executor
from wingbeat.errors import PeerError
from wingbeat.transport import loopback
from wingbeat.transport.world import World

SIZES = [0, 1, 2, 7, 64, 1000, 70_003]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOPOLOGIES = ["ring", "mesh", "doubling"]


def inputs(size: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [
        torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)
        for rank in range(size)
    ]


def exact(values: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([v.double() for v in values]).sum(0)


def tolerance(values: list[torch.Tensor]) -> torch.Tensor:
    """One rounding of the dtype for each of the P-1 additions, relative to the magnitudes."""
    magnitude = torch.stack([v.double().abs() for v in values]).sum(0)
    return torch.finfo(values[0].dtype).eps * (len(values) - 1) * magnitude + 1e-12


@pytest.fixture(params=[1, 2, 3, 4, 9], ids="workers={}".format)
def members(request):
    made = loopback.worlds(request.param, interfaces=2 if request.param == 3 else 1)
    yield made
    for world in made:
        world.close()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_all_reduce_is_the_sum_with_equal_bits_everywhere(members, topology, dtype) -> None:
    def body(world: World) -> list[torch.Tensor]:
        collectives = Collectives(world, topology)
        buffers = [inputs(world.size, n, dtype)[world.rank] for n in SIZES]
        for handle in [collectives.all_reduce(b) for b in buffers]:
            handle.wait()
        return buffers

    results = loopback.run(members, body)
    for position, numel in enumerate(SIZES):
        values = inputs(len(members), numel, dtype)
        for result in results:
            assert torch.equal(result[position], results[0][position])
        error = (results[0][position].double() - exact(values)).abs()
        assert (error <= tolerance(values)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_two_halves_make_one_all_reduce(members, topology, dtype) -> None:
    def body(world: World) -> None:
        collectives = Collectives(world, topology)
        for numel in SIZES:
            values = inputs(world.size, numel, dtype)
            whole, halves = values[world.rank].clone(), values[world.rank].clone()
            collectives.all_reduce(whole).wait()
            scattered = collectives.reduce_scatter(halves)
            scattered.wait()
            mine = collectives.owned(numel)
            assert torch.equal(halves[mine.start : mine.stop], whole[mine.start : mine.stop])
            collectives.all_gather(halves, after=scattered).wait()
            assert torch.equal(halves, whole)

    loopback.run(members, body)


@pytest.mark.parametrize("topology", ["ring", "mesh"])
def test_broadcast_copies_the_roots_buffer(members, topology) -> None:
    def body(world: World) -> None:
        collectives = Collectives(world, topology)
        for numel in SIZES:
            for root in (0, world.size - 1):
                values = inputs(world.size, numel, torch.float32)
                buffer = values[world.rank].clone()
                collectives.broadcast(buffer, root).wait()
                assert torch.equal(buffer, values[root])

    loopback.run(members, body)


def test_blocks_of_unequal_length_are_cut_alike_at_both_ends() -> None:
    """A quarter of 131,076 elements is a chunk of one element more than that of 131,075."""

    def body(world: World) -> torch.Tensor:
        buffer = torch.full((131_075 + 131_076,), world.rank + 1.0)
        Collectives(world).all_reduce(buffer).wait()
        return buffer

    with late.open_worlds(2) as (members, _):
        for buffer in loopback.run(members, body):
            assert (buffer == 3).all()


def test_gather_queued_after_its_reduction_waits_for_it() -> None:
    members = loopback.worlds(4)

    def body(world: World) -> torch.Tensor:
        collectives = Collectives(world)
        buffers = [inputs(world.size, 50_000, torch.float32)[world.rank] + i for i in range(6)]
        reduced = [collectives.reduce_scatter(b, bucket=i) for i, b in enumerate(buffers)]
        order = list(reversed(range(6)))
        gathered = [collectives.all_gather(buffers[i], after=reduced[i]) for i in order]
        for handle in gathered:
            handle.wait()
        return torch.stack(buffers)

    results = loopback.run(members, body)
    expected = exact([inputs(4, 50_000, torch.float32)[r] for r in range(4)])
    for i in range(6):
        assert torch.allclose(results[0][i].double(), expected + 4 * i, atol=1e-4)
    assert all(torch.equal(r, results[0]) for r in results)
    for world in members:
        world.close()


def test_a_vanished_peer_is_named_with_the_collective() -> None:
    board = loopback.Switchboard()
    members = loopback.worlds(3, switchboard=board, timeout=5.0)
    board.fail(2)

    def body(world: World) -> str:
        with pytest.raises(PeerError) as caught:
            Collectives(world).all_reduce(torch.ones(1000), bucket=4).wait()
        return str(caught.value)

    first, second = loopback.run(members[:2], body)
    words = "rank 2 failed during all-reduce of bucket 4 on interface lo0 after"
    # In a ring rank 0 receives from rank 2, and rank 1 sends to it.
    assert first.startswith(f"rank 0: {words}")
    assert second.startswith(f"rank 1: {words}")
    assert first.endswith(": connection closed by peer")
    assert second.endswith(": connection closed by peer")


def test_a_silent_peer_is_named_within_the_timeout() -> None:
    members = loopback.worlds(2, timeout=0.3)
    begin = time.monotonic()
    with pytest.raises(PeerError, match=r"rank 0: rank 1 failed during reduce-scatter .*timed out"):
        Collectives(members[0]).reduce_scatter(torch.ones(1000)).wait()
    assert time.monotonic() - begin < 5


def test_collective_without_a_bucket_is_named_by_its_label() -> None:
    starts = {
        "broadcast": lambda c: c.broadcast(torch.ones(4), 1, label="tensors"),
        "all-gather": lambda c: c.all_gather(torch.ones(4), label="tensors"),
    }
    for name, start in starts.items():
        first, _ = loopback.worlds(2, timeout=0.1)
        with pytest.raises(PeerError, match=f"during {name} of tensors on interface lo0"):
            start(Collectives(first)).wait()


def test_submit_after_a_failure_is_refused() -> None:
    members = loopback.worlds(2, timeout=0.2)
    collectives = Collectives(members[0])
    with pytest.raises(PeerError):
        collectives.all_reduce(torch.ones(10)).wait()
    with pytest.raises(PeerError, match="rank 1 failed"):
        collectives.all_reduce(torch.ones(10))


def test_closing_a_world_ends_its_threads() -> None:
    members = loopback.worlds(2)

    def body(world: World) -> Executor:
        collectives = Collectives(world)
        collectives.all_reduce(torch.ones(10)).wait()
        return collectives._executors[0]

    executors = loopback.run(members, body)
    for world in members:
        world.close()
    assert not any(e._running for e in executors)
