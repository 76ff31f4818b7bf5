"""The backend "wingbeat" of torch.distributed, against gloo, in one job of four processes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from helpers.pool import Pool
from integrations import process_group_cases as cases
from wingbeat import testing
from wingbeat.integrations.process_group import ProcessGroupWingbeat
from wingbeat.integrations.process_group.connections import striped

SIZE = 4
FreshPool = Callable[..., Pool]


@pytest.fixture(scope="module")
def job() -> Iterator[Pool]:
    """Four processes whose default group has the backend "wingbeat"."""
    pool = Pool(SIZE, default_group=False)
    pool.run(cases.begin, deadline=150.0)
    yield pool
    pool.close()


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_reductions_of_each_dtype_equal_gloos(dtype: str, job: Pool) -> None:
    whole = not cases.DTYPES[dtype].is_floating_point
    found = job.run(cases.reductions, dtype)
    least = 4 * len(cases.SHAPES) * (len(cases.OPS) + len(cases.BITS) * whole)
    assert found == [least] * SIZE or (dtype == "bool" and min(found) >= least // 2), found


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_movements_of_each_dtype_equal_gloos(dtype: str, job: Pool) -> None:
    assert job.run(cases.movements, dtype) == [7 * len(cases.SHAPES)] * SIZE


CASES = (
    *("averages", "layouts", "works", "coalescing", "functional", "objects", "subgroups"),
    *(
        "meshes",
        "point_to_point",
        "sparse",
        "leaked",
        "inference",
        "stress",
        "direct",
        "rounds",
        "ddp_uneven",
    ),
)


@pytest.mark.parametrize("name", CASES)
def test_case_on_all_ranks_passes(name: str, job: Pool) -> None:
    job.run(getattr(cases, name))


def test_refusals_are_one_line_with_what_to_do(job: Pool) -> None:
    wanted = (
        *("BAND", "use ReduceOp.SUM, then divide", "name the rank", "tag=1048576: allowed are 0"),
        *("name another rank", "pass one for each rank", "of the same size and dtype"),
        *("allowed are 4 elements", "allowed are 8 elements", "pass one for each rank"),
        *("[1, 1, 1, 2]: allowed are 4 numbers", "one dtype in each call", "no tensors"),
        *('init_process_group("cpu:wingbeat,cuda:nccl")', "leave out sort_ranks"),
    )
    for said in job.run(cases.refusals):
        for line, part in zip(said, wanted, strict=True):
            assert part in line, (part, line)
            assert "\n" not in line


def test_monitored_barrier_without_ranks_names_them(job: Pool) -> None:
    first = job.run(cases.monitored, (2, 3), False)
    assert first[0] == "Rank 2 failed to pass monitoredBarrier in 1000 ms"
    assert first[1].startswith("Rank 1 successfully reached monitoredBarrier")
    assert job.run(cases.monitored, (1, 3), True)[0].startswith("Ranks 1, 3 failed")


@pytest.mark.parametrize("members", [(0, 1), (0, 1, 2), (0, 1, 2, 3)], ids=len)
def test_ddp_trains_as_over_gloo(members: tuple[int, ...], job: Pool) -> None:
    """With two ranks there is one order of a sum, so that every bit is the same."""
    same = job.run(cases.ddp, members)
    assert all(same) or len(members) > 2


def test_ddp_hooks_and_sparse_gradients_leave_ranks_equal(job: Pool) -> None:
    job.run(cases.ddp_hooks)


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=["fsdp", "hsdp"])
def test_fsdp2_trains_as_over_gloo(shape: tuple[int, ...], job: Pool) -> None:
    assert max(job.run(cases.fsdp, shape, False)) < 1e-5
    assert max(job.run(cases.fsdp, shape, True)) < 0.02  # sums in bfloat16


def test_checkpoint_of_sharded_model_loads(job: Pool, tmp_path: Path) -> None:
    job.run(cases.checkpoint, str(tmp_path))


@pytest.mark.slow  # imports Lightning in each process
def test_lightnings_ddp_strategy_trains_on_it(fresh_pool: FreshPool, tmp_path: Path) -> None:
    fresh_pool(2).run(cases.lightning, str(tmp_path), deadline=150.0)


def test_other_devices_keep_their_backends(fresh_pool: FreshPool) -> None:
    fresh_pool(3).run(cases.other_devices)


def test_destroyed_groups_leave_nothing_and_begin_again(fresh_pool: FreshPool) -> None:
    assert fresh_pool(2).run(cases.again) == [([], 0)] * 2


@pytest.mark.parametrize(
    "operation",
    [
        *("all_reduce", "recv", "wait"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("future", "all_gather", "all_to_all", "ddp")
        ),
    ],
)
def test_missing_call_fails_within_the_timeout(operation: str, fresh_pool: FreshPool) -> None:
    seconds, error, known = fresh_pool(2).run(cases.missing, operation, 2.0)[0]
    assert 0.4 < seconds < 15.0, seconds  # not ten timeouts, as for a rank of a job that is alive
    assert "rank 1 failed" in error or (operation == "wait" and "timed out after 0.5 s" in error)
    assert known or operation == "ddp", error  # its error crosses C++


@pytest.mark.parametrize("operation", ["all_reduce", "recv"])
def test_dead_rank_is_named(operation: str, fresh_pool: FreshPool) -> None:
    outcomes = fresh_pool(3).outcomes(cases.death, operation)
    assert outcomes[1].kind == "died"
    for other in (0, 2):
        assert "rank 1 failed" in outcomes[other].value, outcomes[other]


def test_failed_rank_is_named_with_its_exception(fresh_pool: FreshPool) -> None:
    error = fresh_pool(2).run(cases.failure)[0]
    assert "rank 1 failed with ValueError: no such batch" in error, error


def test_abort_ends_operations_in_progress(fresh_pool: FreshPool) -> None:
    errors = fresh_pool(2).run(cases.abort)[0].split(" | ")
    assert len(errors) == 2, errors
    assert "abandoned by this rank" in errors[0]


def test_large_message_is_divided_by_the_speeds_of_links() -> None:
    world = testing.worlds(2, interfaces=2)[0]
    world.speeds = (1.0, 3.0)
    parts = striped(world, torch.arange(400_000).to(torch.uint8))
    assert [(link.name, part.numel()) for link, part in parts] == [
        ("lo0", 100_000),
        ("lo1", 300_000),
    ]
    assert torch.equal(torch.cat([p for _, p in parts]), torch.arange(400_000).to(torch.uint8))
    assert [link.name for link, _ in striped(world, torch.zeros(1000, dtype=torch.uint8))] == [
        "lo0"
    ]


@pytest.fixture
def alone() -> Iterator[ProcessGroupWingbeat]:
    """A group of one process."""
    dist.init_process_group("wingbeat", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_group_of_one_returns_its_own_tensors(alone: ProcessGroupWingbeat) -> None:
    tensor = torch.arange(3.0)
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT):
        dist.all_reduce(tensor, op)
    gathered = [torch.empty(3)]
    dist.all_gather(gathered, tensor)
    exchanged, part = torch.empty(3), torch.empty(3)
    dist.all_to_all_single(exchanged, tensor)
    dist.reduce_scatter_tensor(part, tensor)
    dist.broadcast(tensor, 0)
    dist.barrier()
    found = [None]
    dist.all_gather_object(found, "one")
    assert all(torch.equal(t, torch.arange(3.0)) for t in (tensor, gathered[0], exchanged, part))
    assert found == ["one"]


def test_ddp_of_one_process_has_its_own_gradients(alone: ProcessGroupWingbeat) -> None:
    """The reducer with two dtypes, and parameters without gradient."""
    model = nn.ModuleList([nn.Linear(2, 2).double(), nn.Linear(2, 2), nn.Linear(2, 2)])

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layers[1](self.layers[0](x).float())
            return out

    wrapped = nn.parallel.DistributedDataParallel(Mixed(), find_unused_parameters=True)
    for _ in range(3):
        wrapped(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
    assert model[2].weight.grad is None
    assert torch.equal(model[1].bias.grad, torch.full((2,), 3.0))


def test_entry_point_of_the_package_registers_the_backend() -> None:
    """torch looks it up when a program names the backend; here the text of the file is read."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    _, _, after = text.partition(
        '[project.entry-points."torch.distributed.backends"]\nwingbeat = "'
    )
    module, _, name = after.partition('"')[0].partition(":")
    getattr(importlib.import_module(module), name)()
    assert dist.Backend("wingbeat") == dist.Backend.WINGBEAT


def test_backend_is_registered_with_name_and_timeout(alone: ProcessGroupWingbeat) -> None:
    assert dist.get_backend() == "wingbeat"
    assert alone.name() == "wingbeat"
    assert alone.group_name
    assert alone.options._timeout == dist.distributed_c10d.default_pg_timeout
