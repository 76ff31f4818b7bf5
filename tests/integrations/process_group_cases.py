"""What the workers of tests/integrations/test_process_group.py do; gloo is the reference."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import threading
import time
import unittest.mock
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import wingbeat.integrations.process_group  # noqa: F401  (registers the backend)
from wingbeat.errors import PeerError, UsageError
from wingbeat.integrations.process_group import ProcessGroupWingbeat

TIMEOUT = timedelta(seconds=30)
Op = dist.ReduceOp

_gloo: Any = None


def join(timeout: float = TIMEOUT.total_seconds(), backend: str = "wingbeat") -> None:
    """Join the default group, unless an earlier case did."""
    if not dist.is_initialized():
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))


def gloo() -> Any:
    """A group of the same ranks over gloo."""
    global _gloo
    join()
    if _gloo is None:
        _gloo = dist.new_group(backend="gloo", timeout=TIMEOUT)
    return _gloo


def begin() -> None:
    """Connect both groups."""
    gloo()


def values(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Small whole numbers, whose sums and products are exact in every dtype; differ by rank."""
    made = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randint(0, 3, tuple(shape), generator=made).to(dtype)


SHAPES = ((), (1,), (7,), (50, 3), (30_001,))
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8),
        *(torch.int32, torch.int64, torch.bool),
    )
}
OPS = {"SUM": Op.SUM, "PRODUCT": Op.PRODUCT, "MIN": Op.MIN, "MAX": Op.MAX}
BITS = {"BAND": Op.BAND, "BOR": Op.BOR, "BXOR": Op.BXOR}


def both(operation: Callable[[Any], Sequence[torch.Tensor]], what: object) -> bool:
    """Compare bits with gloo's, and return whether gloo does the operation at all."""
    try:
        expected = operation(gloo())
    except (RuntimeError, ValueError):
        return False
    for mine, theirs in zip(operation(dist.group.WORLD), expected, strict=True):
        assert mine.dtype == theirs.dtype, what
        assert torch.equal(mine, theirs), (what, mine, theirs)
    return True


def reductions(name: str) -> int:
    """Every reduction of one dtype; returns how many were compared."""
    join()
    dtype, size = DTYPES[name], dist.get_world_size()
    whole = not dtype.is_floating_point
    compared = 0

    def all_reduce(tensor: torch.Tensor, op: Any, group: Any) -> list[torch.Tensor]:
        out = tensor.clone()
        dist.all_reduce(out, op, group)
        return [out]

    def reduce(tensor: torch.Tensor, op: Any, group: Any) -> list[torch.Tensor]:
        out = tensor.clone()
        dist.reduce(out, 1, op, group)
        return [out] if dist.get_rank() == 1 else []

    def reduce_scatter(tensor: torch.Tensor, op: Any, group: Any) -> list[torch.Tensor]:
        out = torch.empty_like(tensor)
        pieces = [tensor + (r if dtype != torch.bool else False) for r in range(size)]
        dist.reduce_scatter(out, pieces, op, group)
        return [out]

    def reduce_scatter_tensor(tensor: torch.Tensor, op: Any, group: Any) -> list[torch.Tensor]:
        out = torch.empty(tensor.numel(), dtype=dtype)
        dist.reduce_scatter_tensor(out, tensor.flatten().repeat(size), op, group)
        return [out]

    for seed, shape in enumerate(SHAPES):
        tensor = values(shape, dtype, seed)
        for op in (OPS | BITS if whole else OPS).values():
            for call in (all_reduce, reduce, reduce_scatter, reduce_scatter_tensor):
                what = name, shape, op, call.__name__
                compared += both(functools.partial(call, tensor, op), what)
    return compared


def averages() -> None:
    """AVG and PREMUL_SUM, which gloo does not have for all operations."""
    join()
    size = dist.get_world_size()
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.full((5,), 2.0 * dist.get_rank(), dtype=dtype)
        dist.all_reduce(tensor, Op.AVG)
        assert torch.equal(tensor, torch.full((5,), size - 1.0, dtype=dtype)), tensor
    part = torch.empty(3)
    dist.reduce_scatter_tensor(part, torch.ones(3 * size) * dist.get_rank(), Op.AVG)
    assert torch.equal(part, torch.full((3,), (size - 1) / 2)), part
    dist.reduce_scatter_tensor(part, torch.ones(3 * size), Op.PREMUL_SUM(0.5))
    assert torch.equal(part, torch.full((3,), size / 2)), part


def _broadcast(tensor: torch.Tensor, group: Any) -> list[torch.Tensor]:
    out = tensor.clone()
    dist.broadcast(out, 2, group)
    return [out]


def _like_each_rank(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [torch.zeros_like(tensor) for _ in range(dist.get_world_size())]


def _all_gather(tensor: torch.Tensor, group: Any) -> list[torch.Tensor]:
    out = _like_each_rank(tensor)
    dist.all_gather(out, tensor, group)
    return out


def _all_gather_into_tensor(tensor: torch.Tensor, group: Any) -> list[torch.Tensor]:
    out = torch.zeros(dist.get_world_size() * tensor.numel(), dtype=tensor.dtype)
    dist.all_gather_into_tensor(out, tensor.flatten(), group)
    return [out]


def _gather(tensor: torch.Tensor, group: Any) -> list[torch.Tensor]:
    out = _like_each_rank(tensor) if dist.get_rank() == 3 else None
    dist.gather(tensor, out, 3, group)
    return out or []


def _scatter(tensor: torch.Tensor, group: Any) -> list[torch.Tensor]:
    out = torch.zeros_like(tensor)
    pieces = [tensor.flatten().roll(r).view(tensor.shape) for r in range(dist.get_world_size())]
    dist.scatter(out, pieces if dist.get_rank() == 1 else None, 1, group)
    return [out]


def _all_to_all(tensor: torch.Tensor, group: Any) -> list[torch.Tensor]:
    out = _like_each_rank(tensor)
    pieces = [tensor.flatten().roll(r).view(tensor.shape) for r in range(dist.get_world_size())]
    dist.all_to_all(out, pieces, group)
    return out


def _all_to_all_single(tensor: torch.Tensor, group: Any) -> list[torch.Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = tensor.reshape(-1, 1)
    counts = [tensor.shape[0] * r for r in range(size)]  # none for rank 0
    out = torch.zeros(size * counts[rank], 1, dtype=tensor.dtype)
    rows = torch.cat([tensor] * sum(range(size)))
    dist.all_to_all_single(out, rows, [counts[rank]] * size, counts, group=group)
    return [out]


def movements(name: str) -> int:
    """Every operation that moves tensors of one dtype; returns how many were compared."""
    join()
    calls = (
        *(_broadcast, _all_gather, _all_gather_into_tensor, _gather, _scatter, _all_to_all),
        _all_to_all_single,
    )
    compared = 0
    for seed, shape in enumerate(SHAPES):
        tensor = values(shape, DTYPES[name], seed)
        for call in calls:
            compared += both(functools.partial(call, tensor), (name, shape, call.__name__))
    return compared


def layouts() -> None:
    """Tensors that are not contiguous, and tensors without elements."""
    join()
    rank, size = dist.get_rank(), dist.get_world_size()

    def strided(fill: float = 0.0) -> torch.Tensor:
        made = torch.full((4, 6), float(fill))
        return made.t()[::2]

    tensor = strided(rank + 1.0)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((3, 4), 10.0)), tensor
    tensor = strided(rank)
    dist.broadcast(tensor, 3)
    assert torch.equal(tensor, torch.full((3, 4), 3.0))
    out = [strided() for _ in range(size)]
    dist.all_gather(out, strided(rank))
    assert all(torch.equal(each, torch.full((3, 4), 1.0 * r)) for r, each in enumerate(out))
    out = [strided() for _ in range(size)]
    dist.all_to_all(out, [strided(10 * rank + r) for r in range(size)])
    assert [each[0, 0].item() for each in out] == [10 * r + rank for r in range(size)]
    dist.reduce_scatter(tensor, [strided(r) for r in range(size)])
    assert torch.equal(tensor, torch.full((3, 4), 4.0 * rank))
    after, before = (rank + 1) % size, (rank - 1) % size
    sent = dist.isend(strided(rank), after)
    dist.recv(tensor, before)
    sent.wait()
    assert torch.equal(tensor, torch.full((3, 4), 1.0 * before))
    image = torch.full((2, 3, 4, 4), rank + 1.0).to(memory_format=torch.channels_last)
    dist.all_reduce(image)
    assert torch.equal(image, torch.full((2, 3, 4, 4), 10.0))

    nothing = torch.empty(0, 3)
    dist.all_reduce(nothing)
    dist.all_reduce(nothing, Op.MAX)
    dist.broadcast(nothing, 1)
    dist.all_gather([nothing] * size, nothing)
    dist.all_to_all_single(nothing, nothing)
    dist.reduce_scatter_tensor(nothing, nothing)
    assert nothing.shape == (0, 3)
    pieces = [torch.full((r,), 1.0 * rank) for r in range(size)]  # sizes that differ
    own = torch.empty(rank)
    dist.reduce_scatter(own, pieces)
    assert torch.equal(own, torch.full((rank,), 6.0))
    found = [torch.empty(r) for r in range(size)]
    dist.all_gather(found, torch.full((rank,), 1.0 * rank))
    assert all(torch.equal(each, torch.full((r,), 1.0 * r)) for r, each in enumerate(found))


def works() -> None:
    """Handles of operations in progress: wait, futures, their callbacks."""
    join()
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((1000,), rank + 1.0)
    work = dist.all_reduce(tensor, async_op=True)
    assert work.wait(timedelta(seconds=20))
    assert work.is_completed()
    assert work.is_success()
    assert work.result()[0] is tensor
    with unittest.mock.patch("threading.Thread.start", side_effect=AssertionError):
        assert work.get_future().done()  # DDP reads its value without a wait
    doubled = (
        dist.all_reduce(torch.ones(3), async_op=True).get_future().then(lambda f: 2 * f.value()[0])
    )
    assert torch.equal(doubled.wait(), torch.full((3,), 2.0 * size))

    def again(future: Any) -> torch.Tensor:
        inner = dist.all_reduce(future.value()[0], async_op=True)  # as PowerSGD's hook does
        inner.wait()
        return inner.result()[0]

    futures = [dist.all_reduce(torch.ones(3), async_op=True).get_future() for _ in range(1)]
    chained = [future.then(again) for future in futures]
    assert all(torch.equal(f.wait(), torch.full((3,), 1.0 * size * size)) for f in chained)

    later = torch.empty(4)
    request = dist.irecv(later, (rank - 1) % size)
    assert not request.is_completed()
    dist.barrier()  # no rank has sent
    dist.send(torch.full((4,), 1.0 * rank), (rank + 1) % size)
    deadline = time.monotonic() + 20
    while not request.is_completed() and time.monotonic() < deadline:
        time.sleep(0.001)
    request.wait()
    assert torch.equal(later, torch.full((4,), 1.0 * ((rank - 1) % size)))
    request.wait()  # again

    many = [torch.full((n,), float(rank)) for n in (1, 100, 50_000) for _ in range(20)]
    for each in [dist.all_reduce(tensor, async_op=True) for tensor in many]:
        each.wait()
    assert all(torch.equal(tensor, torch.full_like(tensor, 6.0)) for tensor in many)


def rounds() -> None:
    """Four ranks sum up to 16 KB in one round, below 80 KB in few rounds, more around the ring."""
    join()
    group = dist.group.WORLD
    for kb, expected in (
        (1, group._ring),
        (16, group._ring),
        (17, group._short),
        (80, group._ring),
    ):
        tensor = torch.ones(256 * kb)
        assert group._collectives(tensor) is expected, kb
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.full_like(tensor, 4.0))


def coalescing() -> None:
    """Several tensors in one call."""
    join()
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    tensors = [torch.full((n,), rank + 1.0) for n in (1, 5, 300)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    assert all(torch.equal(tensor, torch.full_like(tensor, 10.0)) for tensor in tensors)
    outs, ins = [torch.empty(size * n) for n in (2, 3)], [torch.full((n,), rank) for n in (2, 3)]
    with dist._coalescing_manager():
        for out, tensor in zip(outs, ins, strict=True):
            dist.all_gather_into_tensor(out, tensor.float())
    for out, n in zip(outs, (2, 3), strict=True):
        assert torch.equal(out, torch.arange(size).repeat_interleave(n).float())
    parts = [torch.empty(n) for n in (2, 3)]
    with dist._coalescing_manager():
        for part in parts:
            dist.reduce_scatter_tensor(part, torch.ones(size * part.numel()) * rank)
    assert all(torch.equal(part, torch.full_like(part, 6.0)) for part in parts)
    lists = [[torch.empty(2), torch.empty(3)] for _ in range(size)]
    dist.all_gather_coalesced(lists, [torch.full((2,), 1.0 * rank), torch.full((3,), 2.0 * rank)])
    assert [(a[0].item(), b[0].item()) for a, b in lists] == [(r, 2.0 * r) for r in range(size)]
    assert isinstance(group, ProcessGroupWingbeat)


def functional() -> None:
    """The functional collectives, which DTensor uses and which C++ carries out."""
    from torch.distributed import _functional_collectives as f

    join()
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    assert torch.equal(f.all_reduce(torch.ones(3), "sum", group) + 0, torch.full((3,), 1.0 * size))
    gathered = f.all_gather_tensor(torch.full((2,), 1.0 * rank), 0, group) + 0
    assert torch.equal(gathered, torch.arange(size).repeat_interleave(2).float())
    part = f.reduce_scatter_tensor(torch.ones(2 * size), "avg", 0, group) + 0
    assert torch.equal(part, torch.ones(2))
    exchanged = f.all_to_all_single(torch.arange(size) + 10 * rank, None, None, group) + 0
    assert exchanged.tolist() == [10 * r + rank for r in range(size)]
    coalesced = f.all_reduce_coalesced([torch.ones(1), torch.ones(2)], "sum", group)
    assert [(each + 0)[0].item() for each in coalesced] == [size, size]
    assert (f.broadcast(torch.full((2,), rank), 2, group) + 0).tolist() == [2, 2]


def direct() -> None:
    """A group that a program creates itself, as torchft does at each change of its members."""
    join()
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    for turn, size in enumerate((4, 3)):
        if rank < size:
            inner = dist.PrefixStore(f"direct/{turn}/", store)
            group = ProcessGroupWingbeat(inner, rank, size, TIMEOUT)
            tensor = torch.tensor([rank + 1.0])
            group.allreduce([tensor]).wait()
            group.allreduce([tensor], Op.MAX).get_future().wait()
            assert tensor.item() == size * (size + 1) / 2
            options = dist.BroadcastOptions()
            options.rootRank = size - 1
            group.broadcast([tensor.fill_(rank)], options).wait()
            group.barrier().wait()
            assert tensor.item() == size - 1
            assert (group.rank(), group.size(), group.getBackendName()) == (rank, size, "wingbeat")
            group.shutdown()
    dist.barrier()


def lightning(folder: str) -> None:
    """Lightning's DDPStrategy with the backend."""
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _net()

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    size = int(os.environ["WORLD_SIZE"])
    trainer = pl.Trainer(
        accelerator="cpu", devices=size, max_epochs=2, logger=False, enable_progress_bar=False,
        strategy=DDPStrategy(process_group_backend="wingbeat"), default_root_dir=folder,
    )  # fmt: skip
    module = Module()
    made = torch.Generator().manual_seed(2)
    trainer.fit(module, torch.utils.data.DataLoader(torch.randn(32, 8, generator=made), 4))
    assert isinstance(dist.group.WORLD, ProcessGroupWingbeat)
    assert trainer.world_size == size
    _equal_on_all_ranks(module.net)
    dist.destroy_process_group()


def objects() -> None:
    """Collectives of objects."""
    join()
    rank, size = dist.get_rank(), dist.get_world_size()
    found: list[Any] = [None] * size
    dist.all_gather_object(found, {"rank": rank, "text": "x" * rank * 1000})
    assert [each["rank"] for each in found] == list(range(size))
    given = [rank, "text"] if rank == 1 else [None, None]
    dist.broadcast_object_list(given, 1)
    assert given == [1, "text"]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [f"for {r}" for r in range(size)] if rank == 2 else None, 2)
    assert mine == [f"for {rank}"]
    gathered: list[Any] | None = [None] * size if rank == 3 else None
    dist.gather_object((rank,), gathered, 3)
    assert gathered is None or gathered == [(r,) for r in range(size)]


MEMBERS = ((0, 1), (2, 3), (0, 2), (1, 3), (0, 1, 2), (1, 2, 3), (0, 1, 2, 3), (3,))


def _number(members: tuple[int, ...]) -> int:
    return 10 * MEMBERS.index(members)


def subgroups() -> None:
    """Calls of groups with different members, in another order on each rank."""
    join()
    rank = dist.get_rank()
    groups = {members: dist.new_group(list(members)) for members in MEMBERS}
    own = [members for members in MEMBERS if rank in members]
    for turn in range(5):
        shuffled = own[rank:] + own[:rank] if turn % 2 else own[::-1]
        in_progress = []
        for members in shuffled:
            group = groups[members]
            summed = torch.full((10 + turn,), 1.0 * rank)
            gathered = [torch.empty(1) for _ in members]
            exchanged = torch.empty(len(members))
            in_progress.append(
                (
                    members,
                    (summed, gathered, exchanged),
                    [
                        dist.all_reduce(summed, group=group, async_op=True),
                        dist.all_gather(gathered, torch.tensor([1.0 * rank]), group, True),
                        dist.all_to_all_single(
                            exchanged, torch.full((len(members),), 1.0 * rank + _number(members)),
                            group=group, async_op=True,
                        ),
                    ],
                )
            )  # fmt: skip
        for members, (summed, gathered, exchanged), pending in in_progress:
            for work in pending:
                work.wait()
            assert torch.equal(summed, torch.full((10 + turn,), 1.0 * sum(members)))
            assert [each.item() for each in gathered] == list(members)
            assert exchanged.tolist() == [r + _number(members) for r in members]
    trio = groups[0, 1, 2]
    if rank in (0, 2):  # without the third member, and not through the default group
        tensor = torch.full((2,), 1.0 * rank)
        other = 2 - rank
        request = dist.isend(tensor, other, trio, tag=5)
        received = torch.empty(2)
        dist.recv(received, other, trio, tag=5)
        request.wait()
        assert torch.equal(received, torch.full((2,), 1.0 * other))
    local = dist.new_group(
        [r for r in range(4) if r % 2 == rank % 2], use_local_synchronization=True
    )
    dist.barrier(local)
    for group in (*(groups[members] for members in own), local):
        dist.destroy_process_group(group)
    dist.barrier()


def meshes() -> None:
    """A mesh of two dimensions."""
    join()
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for name, expected in (("replicate", rank + (rank + 2) % 4), ("shard", rank + (rank ^ 1))):
        tensor = torch.tensor([1.0 * rank])
        dist.all_reduce(tensor, group=mesh.get_group(name))
        assert tensor.item() == expected, (name, tensor)
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    whole = torch.arange(24.0).view(4, 6)
    spread = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    assert spread.to_local().shape == (2, 3)
    assert torch.equal((spread @ spread.T).full_tensor(), whole @ whole.T)
    assert torch.equal(spread.redistribute(mesh, [Replicate(), Replicate()]).to_local(), whole)


def point_to_point() -> None:
    """Messages of one pair arrive in order; tags separate them; large ones are divided."""
    join()
    rank, size = dist.get_rank(), dist.get_world_size()
    other = rank ^ 1
    if rank < other:
        for n in range(20):
            dist.send(torch.full((3,), 1.0 * n), other)
        dist.send(torch.ones(1), other, tag=7)
        dist.send(torch.zeros(1), other, tag=8)
    else:
        for n in range(20):
            tensor = torch.empty(3)
            dist.recv(tensor, other)
            assert torch.equal(tensor, torch.full((3,), 1.0 * n))
        zero, one = torch.empty(1), torch.empty(1)
        requests = dist.irecv(zero, other, tag=8), dist.irecv(one, other, tag=7)
        for request in requests:
            request.wait()
        assert (zero.item(), one.item()) == (0, 1)
    large = torch.arange(500_000) + rank
    received = torch.empty(500_000, dtype=torch.int64)
    requests = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.irecv, received, (rank - 1) % size),
            dist.P2POp(dist.isend, large, (rank + 1) % size),
        ]
    )
    for request in requests:
        request.wait()
    assert torch.equal(received, torch.arange(500_000) + (rank - 1) % size)


def leaked() -> None:
    """A barrier waits for collectives whose handles were dropped."""
    join()
    size = dist.get_world_size()
    tensors = [torch.full((100, 100), float(i)).t() for i in range(16)]
    columns = [torch.full((100, 2), float(i))[:, 0] for i in range(16)]
    for tensor in (*tensors, *columns):
        dist.all_reduce(tensor, async_op=True)
    dist.barrier(async_op=True).get_future().wait()
    for kind in (tensors, columns):
        for i, tensor in enumerate(kind):
            assert torch.equal(tensor, torch.full_like(tensor, float(i * size)))


def inference() -> None:
    """Tensors that are made in inference mode, as in evaluation."""
    join()
    rank, size = dist.get_rank(), dist.get_world_size()
    with torch.inference_mode():
        tensor, column = torch.full((100,), rank + 1.0), torch.full((4, 2), rank + 1.0)[:, 0]
        dist.all_reduce(tensor)
        future = dist.all_reduce(column, async_op=True).get_future()
        future.wait()
        found = [torch.empty(2) for _ in range(size)]
        dist.all_gather(found, torch.full((2,), 1.0 * rank))
        objects: list[Any] = [None] * size
        dist.all_gather_object(objects, rank)
    assert torch.equal(tensor, torch.full((100,), 10.0))
    assert torch.equal(column, torch.full((4,), 10.0))
    assert [each[0].item() for each in found] == objects == list(range(size))


def stress() -> None:
    """Hundreds of operations of every kind in progress, by their futures."""
    join()
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    turns = range(60)
    futures: list[list[Any]] = []
    for i in turns:
        root = i % size
        summed, sent = torch.tensor([i + rank]), torch.tensor([i * size + rank])
        rooted = torch.tensor([i + rank])
        rows = [torch.zeros_like(summed) for _ in range(size)]
        part = torch.empty_like(summed)
        pieces = [torch.tensor([i + r]) for r in range(size)] if rank == root else None
        collected = [torch.zeros_like(summed) for _ in range(size)] if rank == root else None
        futures.append(
            [
                work.get_future()
                for work in (
                    dist.all_reduce(summed, async_op=True),
                    dist.broadcast(sent, root, async_op=True),
                    dist.all_gather(rows, torch.tensor([i + rank]), async_op=True),
                    dist.scatter(part, pieces, root, async_op=True),
                    dist.gather(torch.tensor([i + rank]), collected, root, async_op=True),
                    dist.reduce(rooted, root, async_op=True),
                )
            ]
        )
    total = size * (size - 1) // 2
    for i, each in zip(turns, futures, strict=True):
        summed, sent, rows, part, collected, rooted = (future.wait() for future in each)
        mine = rank == i % size
        assert summed[0].item() == i * size + total
        assert sent[0].item() == i * size + i % size
        assert [row.item() for row in rows] == [i + r for r in range(size)]
        assert part[0].item() == i + rank
        assert [row.item() for row in collected] == [i + r for r in range(size)] * mine
        assert rooted[0].item() == i * size + total or not mine
    assert isinstance(group, ProcessGroupWingbeat)


def sparse() -> None:
    """Sums of sparse tensors."""
    join()
    rank, size = dist.get_rank(), dist.get_world_size()

    def made() -> torch.Tensor:
        places = torch.tensor([[0, rank, 5 + rank]])
        rows = torch.full((3, 2), rank + 1.0)
        return torch.sparse_coo_tensor(places, rows, (5 + size, 2), check_invariants=True)

    mine, theirs = made(), made()
    dist.all_reduce(mine)
    dist.all_reduce(theirs, group=gloo())
    assert torch.equal(mine.to_dense(), theirs.to_dense())
    sums = [torch.eye(n).mul(rank + n).to_sparse() for n in range(1, 9)]
    for work in [dist.all_reduce(each, async_op=True) for each in sums]:
        work.wait()
    for n, each in enumerate(sums, 1):
        assert torch.equal(each.to_dense(), torch.eye(n) * sum(r + n for r in range(size)))
    nothing = torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.int64), [], (4,))
    dist.all_reduce(nothing)
    assert nothing.to_dense().tolist() == [0] * 4


def refusals() -> list[str]:
    """Return the texts of what is refused."""
    join()
    group, rank = dist.group.WORLD, dist.get_rank()
    one, two = torch.ones(1), torch.ones(2)
    whole = torch.ones(2, dtype=torch.int64)
    cases: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(one, Op.BAND),
        lambda: dist.all_reduce(whole, Op.AVG),
        lambda: dist.recv(one),
        lambda: dist.send(one, (rank + 1) % 4, tag=1 << 20),
        lambda: group.send([one], rank, 0),
        lambda: group.allgather([[one] * 3], [one]),
        lambda: group.allgather([[two] * 4], [one]),
        lambda: dist.all_gather_into_tensor(two, one),
        lambda: dist.reduce_scatter_tensor(two, one),
        lambda: group.alltoall([one] * 4, [one] * 3),
        lambda: dist.all_to_all_single(torch.empty(4), torch.empty(4), [1, 1, 1, 2], [1] * 4),
        lambda: group.allreduce([one, whole]),
        lambda: group.allreduce([]),
        lambda: group.allreduce(torch.ones(1, device="meta")),
        lambda: dist.new_group([1, 0, 2, 3], sort_ranks=False),
    ]
    said = []
    for case in cases:
        try:
            case()
        except (UsageError, RuntimeError) as error:
            said.append(str(error))
        else:
            said.append("nothing")
    return said


def monitored(absent: tuple[int, ...], every: bool) -> str:
    """`monitored_barrier` without some ranks; returns the error."""
    join()
    dist.monitored_barrier()
    error = ""
    if dist.get_rank() not in absent:
        try:
            dist.monitored_barrier(timeout=timedelta(seconds=1), wait_all_ranks=every)
        except RuntimeError as failure:
            error = str(failure)
    else:
        next(dist.group.WORLD._barriers)  # as if this rank had called and failed
    dist.barrier()
    return error


def _net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Linear(16, 4))


def _train(model: nn.Module, steps: int = 4) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    made = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        model(torch.randn(6, 8, generator=made)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def ddp(members: tuple[int, ...]) -> bool:
    """Train DDP on this backend and on gloo; whether the weights have the same bits."""
    join()
    trained = []
    for backend in ("wingbeat", "gloo"):
        group = dist.new_group(list(members), backend=backend)
        if dist.get_rank() in members:
            model = DistributedDataParallel(
                _net(), process_group=group, bucket_cap_mb=0.0005, static_graph=False
            )
            _train(model)
            trained.append([value.clone() for value in model.state_dict().values()])
    if not trained:
        return True
    for mine, theirs in zip(*trained, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    return all(torch.equal(mine, theirs) for mine, theirs in zip(*trained, strict=True))


def ddp_hooks() -> None:
    """torch's communication hooks, and a model with sparse gradients."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    join()
    model = DistributedDataParallel(_net())
    model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    _train(model)
    model = DistributedDataParallel(_net(), bucket_cap_mb=0.0005)
    state = power.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, power.powerSGD_hook)
    _train(model)
    _equal_on_all_ranks(model)
    torch.manual_seed(1)
    inner = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for turn in range(3):
        model(torch.tensor([dist.get_rank(), turn + 5])).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    _equal_on_all_ranks(model)


def ddp_uneven() -> None:
    """Ranks with different numbers of batches, whose backwards read what a forward has begun."""
    join()
    model = DistributedDataParallel(nn.Linear(3, 1, bias=False))
    with model.join(divide_by_initial_world_size=False):
        for _ in range(2 + dist.get_rank()):
            model.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            assert torch.equal(model.module.weight.grad, torch.ones(1, 3))
    dist.barrier()


def _equal_on_all_ranks(model: nn.Module) -> None:
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    rows = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, flat)
    assert all(torch.equal(row, rows[0]) for row in rows)


def _with_backend(name: str) -> Any:
    """Let `init_device_mesh` create its groups with a backend."""
    created = dist.new_group

    def new_group(*args: Any, **kwargs: Any) -> Any:
        return created(*args, **{**kwargs, "backend": name})

    return unittest.mock.patch("torch.distributed.device_mesh.new_group", new_group)


def fsdp(shape: tuple[int, ...], half: bool) -> float:
    """Train FSDP2 on this backend and on gloo; returns the largest difference of weights."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    join()
    trained = []
    for backend in ("wingbeat", "gloo"):
        with _with_backend(backend):
            names = ("replicate", "shard")[-len(shape) :]
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            if backend == "gloo" and len(shape) == 1:
                from torch.distributed.device_mesh import DeviceMesh

                mesh = DeviceMesh.from_group(gloo(), "cpu", mesh_dim_names=names)
        assert isinstance(mesh.get_group(0), ProcessGroupWingbeat) == (backend == "wingbeat")
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 4))
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16) if half else None
        options = {"mp_policy": policy} if policy else {}
        for layer in (model[0], model[3]):
            fully_shard(layer, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
        _train(model)
        trained.append([parameter.full_tensor() for parameter in model.parameters()])
    pairs = list(zip(*trained, strict=True))
    return max((mine - theirs).abs().max().item() for mine, theirs in pairs)


def checkpoint(folder: str) -> None:
    """torch.distributed.checkpoint of a sharded model."""
    join()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = fully_shard(_net(), mesh=mesh)
    _train(model)
    dcp.save(model.state_dict(), checkpoint_id=folder)
    other = fully_shard(_net(), mesh=mesh)
    state = other.state_dict()
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), theirs.full_tensor())
    dcp.async_save(other.state_dict(), checkpoint_id=f"{folder}/later").result()
    dist.barrier()
    assert Path(folder, "later", ".metadata").exists()


def other_devices() -> None:
    """Backends for other devices, which torch leaves to a group that is written in Python."""
    dist.init_process_group("cpu:wingbeat,cuda:gloo", timeout=TIMEOUT)
    group = dist.group.WORLD
    assert group._device_types == [torch.device("cpu"), torch.device("cuda")]
    assert group._get_backend(torch.device("cpu")) is group
    backend = group.get_backend(torch.device("cuda", 0))
    assert backend.name() == "gloo"
    assert group.get_backend(torch.device("cuda", 1)) is backend
    tensor = torch.ones(2)
    backend.allreduce([tensor]).wait()  # its ranks are connected
    assert torch.equal(tensor, torch.full((2,), 1.0 * dist.get_world_size()))
    part = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        assert part.get_backend(torch.device("cuda")) is not backend
        dist.all_reduce(tensor, group=part)
    dist.destroy_process_group()
    dist.init_process_group("cuda:gloo,cpu:wingbeat", timeout=TIMEOUT)
    group = dist.group.WORLD
    assert isinstance(group, ProcessGroupWingbeat)
    assert group.get_backend(torch.device("cuda")).name() == "gloo"
    dist.destroy_process_group()


def _descriptors() -> set[str]:
    gc.collect()
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return {each for each in found if each.startswith("socket:")}


def again() -> tuple[list[str], int]:
    """Create and destroy groups; returns threads and sockets that remain."""
    for turn in range(3):
        join()
        group = dist.new_group([0, 1])
        tensor = torch.tensor([1.0 * dist.get_rank() + turn])
        dist.all_reduce(tensor)
        if dist.get_rank() < 2:
            dist.all_reduce(tensor, group=group)
            dist.barrier(group)
        dist.destroy_process_group()
        if turn == 0:
            before = len(_descriptors())
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        names = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
        names = [name for name in names if name.startswith("wingbeat")]
        if not names:
            break
        time.sleep(0.05)
    return names, len(_descriptors()) - before


def missing(operation: str, timeout: float) -> tuple[float, str, bool]:
    """Rank 1 does not call the operation: seconds and error of rank 0, and whether c10d's type."""
    join(timeout)
    dist.barrier()
    begin = time.monotonic()
    try:
        if dist.get_rank() == 0:
            tensor = torch.ones(4)
            calls: dict[str, Callable[[], Any]] = {
                "all_reduce": lambda: dist.all_reduce(tensor),
                "future": lambda: dist.all_reduce(tensor, async_op=True).get_future().wait(),
                "all_gather": lambda: dist.all_gather([tensor] * 2, tensor),
                "all_to_all": lambda: dist.all_to_all_single(tensor, tensor),
                "recv": lambda: dist.recv(tensor, 1),
                "ddp": lambda: DistributedDataParallel(nn.Linear(1, 1)),
                "wait": lambda: dist.all_reduce(tensor, async_op=True).wait(timedelta(seconds=0.5)),
            }
            calls[operation]()
        else:
            time.sleep(2.5 * timeout)
    except Exception as error:
        known = isinstance(error, PeerError) and isinstance(error, dist.DistBackendError)
        return time.monotonic() - begin, str(error), known
    return time.monotonic() - begin, "", True


def death(operation: str) -> str:
    """Rank 1 exits; returns the error of the other ranks."""
    join()
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(1)
    tensor = torch.ones(4)
    try:
        if operation == "all_reduce":
            dist.all_reduce(tensor)
        else:
            dist.recv(tensor, 1)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def failure() -> str:
    """Rank 1 leaves with an exception; returns the error of rank 0, which names it."""
    join()
    dist.barrier()
    try:
        if dist.get_rank() == 1:
            try:
                raise ValueError("no such batch")
            finally:
                dist.destroy_process_group()
        dist.all_reduce(torch.ones(4))
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "nothing"


def abort() -> str:
    """Rank 0 aborts while an operation is in progress; returns its error."""
    join()
    dist.barrier()
    if dist.get_rank() == 0:
        works = [dist.all_reduce(torch.ones(4), async_op=True), dist.irecv(torch.ones(4), 1)]
        timer = threading.Timer(0.3, dist.group.WORLD.abort)
        timer.start()
        errors = []
        for work in works:
            try:
                work.wait()
            except RuntimeError as error:
                errors.append(str(error))
        timer.join()
        return " | ".join(errors)
    return ""
