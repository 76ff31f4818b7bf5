"""The path that GPUs take, with elements that travel in another dtype: gloo in NCCL's place."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import wingbeat
from helpers.pool import Pool
from wingbeat import transport
from wingbeat.collectives import Collectives, nccl
from wingbeat.collectives.packing import Cast
from wingbeat.transport.nccl import NcclGroup
from wingbeat.types import Span

WIRES = ["bfloat16", "float16"]
SIZE = 3
NUMEL = 3 * 40


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    made = Pool(SIZE)
    yield made
    made.close()


def native_world() -> transport.World:
    world = wingbeat.init(timeout=20)
    world.make_nccl_group = lambda _: NcclGroup(None, world.rank, world.size)
    world.nccl_devices = frozenset({"cpu"})
    return world


def everyone(buffer: torch.Tensor) -> list[torch.Tensor]:
    sent = [torch.empty_like(buffer) for _ in range(SIZE)]
    torch.distributed.all_gather(sent, buffer)
    return sent


def sums(name: str, dtype: torch.dtype) -> None:
    world = native_world()
    wire = getattr(torch, name)
    collectives = Collectives(world)
    values = [
        torch.randn(NUMEL, generator=torch.Generator().manual_seed(r)).to(dtype)
        for r in range(SIZE)
    ]
    whole, halves = values[world.rank].clone(), values[world.rank].clone()
    handle = collectives.all_reduce(whole, wire=wire)
    handle.wait()
    exact = torch.stack([v.double() for v in values]).sum(0)
    magnitude = torch.stack([v.double().abs() for v in values]).sum(0)
    # The library rounds each contribution and each sum.
    bound = 2 * SIZE * torch.finfo(wire).eps * magnitude
    assert ((whole.double() - exact).abs() <= bound).all()
    assert torch.equal(whole, whole.to(wire).to(dtype))
    assert all(torch.equal(whole, other) for other in everyone(whole))
    # Nobody waits for the reduction: the gather must see it all the same.
    scattered = collectives.reduce_scatter(halves, wire=wire)
    collectives.all_gather(halves, after=scattered, wire=wire).wait_received()
    assert ((halves.double() - exact).abs() <= bound).all()
    assert all(torch.equal(halves, other) for other in everyone(halves))
    wingbeat.shutdown()


def gather_rounds_the_owners_block(name: str) -> None:
    world = native_world()
    collectives = Collectives(world)
    buffer = torch.full((NUMEL,), float("nan"))
    own = collectives.owned(NUMEL)
    buffer[own.start : own.stop] = 1 + 2**-20 + world.rank
    collectives.all_gather(buffer, wire=getattr(torch, name)).wait()
    assert torch.equal(buffer, torch.arange(1.0, SIZE + 1).repeat_interleave(NUMEL // SIZE))
    wingbeat.shutdown()


def the_result_is_copied_once() -> None:
    """What a user writes after waiting is not overwritten by waiting again."""
    collectives = Collectives(native_world())
    buffer = torch.ones(NUMEL)
    handle = collectives.all_reduce(buffer, wire=torch.bfloat16)
    handle.wait_received()
    assert torch.equal(buffer, torch.full((NUMEL,), 3.0))
    buffer.fill_(7)
    handle.wait()
    assert torch.equal(buffer, torch.full((NUMEL,), 7.0))
    scattered = collectives.reduce_scatter(buffer, wire=torch.bfloat16)
    scattered.wait()
    own = collectives.owned(NUMEL)
    buffer[own.start : own.stop].mul_(0.5)  # as clipping does between the two halves
    collectives.all_gather(buffer, after=scattered, wire=torch.bfloat16).wait()
    assert torch.equal(buffer, torch.full((NUMEL,), 10.5))
    wingbeat.shutdown()


def overflow_is_seen() -> None:
    world = native_world()
    buffer = torch.tensor([40000.0, -40000.0, float("nan"), float("inf"), 1e6, 1.0] * 2)
    Collectives(world).all_reduce(buffer, wire=torch.float16).wait()
    inf = float("inf")
    expected = torch.tensor([inf, -inf, float("nan"), inf, inf, 3.0] * 2)
    assert torch.equal(buffer.nan_to_num(5.0, 6e6, -6e6), expected.nan_to_num(5.0, 6e6, -6e6))
    wingbeat.shutdown()


def trained(strategy: wingbeat.Strategy, over_steps: bool) -> torch.Tensor:
    world = wingbeat.init(timeout=20) if over_steps else native_world()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = wingbeat.distribute(model, optimizer, strategy)
    generator = torch.Generator().manual_seed(world.rank)
    for step in range(6):
        optimizer.zero_grad()
        model(torch.randn(4, 5, generator=generator)).square().mean().backward()
        if step % 2:
            optimizer.clip_grad_norm_(0.1)
        optimizer.step()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert all(torch.equal(weights, other) for other in everyone(weights))
    wingbeat.release(model, optimizer)
    wingbeat.shutdown()
    return weights


def training_stays_close(over_steps: bool) -> None:
    exact = trained(wingbeat.AllReduce(), over_steps)
    for wire in ("bf16", "fp16"):
        for strategy in (
            wingbeat.DeAR(plan="fixed", mb=0.0002, edge_mb=0, compression=wire),
            wingbeat.AllReduce(mb=0.0002, compression=wire),
        ):
            weights = trained(strategy, over_steps)
            assert torch.allclose(weights, exact, rtol=0.02, atol=0.01)
            assert not torch.equal(weights, exact)


@pytest.mark.parametrize("name", WIRES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_sums_over_a_narrow_wire(pool: Pool, name: str, dtype: torch.dtype) -> None:
    pool.run(sums, name, dtype)


@pytest.mark.parametrize("name", WIRES)
def test_a_gather_rounds_the_owners_block_too(pool: Pool, name: str) -> None:
    pool.run(gather_rounds_the_owners_block, name)


def test_the_result_is_copied_back_once(pool: Pool) -> None:
    pool.run(the_result_is_copied_once)


def test_an_overflow_arrives_as_infinite(pool: Pool) -> None:
    pool.run(overflow_is_seen)


@pytest.mark.parametrize("over_steps", [True, False], ids=["steps", "native"])
def test_training_stays_close_and_workers_keep_the_same_bits(pool: Pool, over_steps: bool) -> None:
    pool.run(training_stays_close, over_steps)


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["reduce_scatter", "all_gather", "all_reduce"])
def test_on_a_gpu_the_casts_follow_the_current_stream(what: str) -> None:
    """A world of one: NCCL copies, so the result is the buffer as rounded once."""
    world = wingbeat.init()
    wire = Cast(torch.bfloat16, Span(0, 1 << 20))
    source = torch.randn(1 << 20, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # host code below runs long before this ends
        buffer = source * 2
        first = nccl.start(world, what, buffer, None, wire)
        second = nccl.start(world, what, buffer, first, wire)
        second.wait()
        result = buffer + 0
    side.synchronize()
    assert torch.equal(result, (source * 2).bfloat16().float())
    wingbeat.shutdown()
