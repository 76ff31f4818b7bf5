"""The path that GPUs take, on CPUs: whole collectives of a torch.distributed group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import wingbeat
from helpers.pool import Pool
from wingbeat import transport
from wingbeat.collectives import Collectives
from wingbeat.errors import UsageError
from wingbeat.transport import loopback
from wingbeat.transport.nccl import NcclGroup


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    made = Pool(3)
    yield made
    made.close()


class InOrder(NcclGroup):
    """Begins a collective after the last one ended, as on NCCL's streams, unlike gloo's threads."""

    _last: Any = None

    def reduce_scatter(self, buffer: torch.Tensor) -> Any:
        return self._after_last(super().reduce_scatter, buffer)

    def all_gather(self, buffer: torch.Tensor) -> Any:
        return self._after_last(super().all_gather, buffer)

    def all_reduce(self, buffer: torch.Tensor) -> Any:
        return self._after_last(super().all_reduce, buffer)

    def _after_last(self, start: Any, buffer: torch.Tensor) -> Any:
        if self._last is not None:
            self._last.wait()
        self._last = start(buffer)
        return self._last


def native_world() -> transport.World:
    world = wingbeat.init(timeout=20)
    world.make_nccl_group = lambda _: InOrder(None, world.rank, world.size)
    world.nccl_devices = frozenset({"cpu"})
    return world


def halves_make_a_whole() -> None:
    world = native_world()
    collectives = Collectives(world)
    values = [torch.randn(12, generator=torch.Generator().manual_seed(r)) for r in range(3)]
    whole, halves = values[world.rank].clone(), values[world.rank].clone()
    collectives.all_reduce(whole).wait()
    assert torch.allclose(whole, sum(values), atol=1e-6)
    scattered = collectives.reduce_scatter(halves)
    scattered.wait()
    mine = collectives.owned(12)
    assert torch.allclose(halves[mine.start : mine.stop], whole[mine.start : mine.stop])
    collectives.all_gather(halves, after=scattered).wait()
    assert torch.allclose(halves, whole)
    collectives.broadcast(halves, 2).wait_received()
    sent = [torch.zeros(12) for _ in range(3)]
    torch.distributed.all_gather(sent, halves)
    assert all(torch.equal(s, halves) for s in sent)
    wingbeat.shutdown()


def trained(native: bool, strategy: str) -> list[list[float]]:
    world = native_world() if native else wingbeat.init(timeout=20)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    chosen = wingbeat.DeAR(mb=0.0002) if strategy == "dear" else wingbeat.AllReduce(mb=0.0002)
    model, optimizer = wingbeat.distribute(model, optimizer, chosen)
    generator = torch.Generator().manual_seed(world.rank)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(4, 5, generator=generator)).square().mean().backward()
        optimizer.clip_grad_norm_(0.1)
        optimizer.step()
    out = [p.flatten().tolist() for p in model.parameters()]
    wingbeat.release(model, optimizer)
    wingbeat.shutdown()
    return out


def same_training(strategy: str) -> None:
    steps, native = trained(False, strategy), trained(True, strategy)
    for a, b in zip(steps, native, strict=True):
        assert torch.allclose(torch.tensor(a), torch.tensor(b), rtol=1e-5, atol=1e-7)


def test_native_collectives_keep_the_contract(pool: Pool) -> None:
    pool.run(halves_make_a_whole)


@pytest.mark.parametrize("strategy", ["allreduce", "dear"])
def test_training_over_a_process_group_gives_the_same_weights(pool: Pool, strategy: str) -> None:
    pool.run(same_training, strategy)


def test_world_without_a_process_group_raises() -> None:
    world = loopback.worlds(2)[0]
    world.nccl_devices = frozenset({"cpu"})
    with pytest.raises(UsageError, match="carries CPU tensors only"):
        Collectives(world).all_reduce(torch.ones(4))
    world.close()


@pytest.mark.gpu
def test_a_gpu_world_of_one_trains() -> None:
    model = torch.nn.Linear(4, 2).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wingbeat.init()
    before = model.weight.detach().clone()
    model, optimizer = wingbeat.distribute(model, optimizer, wingbeat.DeAR())
    model(torch.ones(3, 4, device="cuda")).sum().backward()
    optimizer.step()
    assert not torch.equal(model.weight, before)
    wingbeat.release(model, optimizer)
    wingbeat.shutdown()
