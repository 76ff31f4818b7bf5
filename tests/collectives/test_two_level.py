"""Collectives on two levels, on hosts with two devices each whose streams run late."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
import torch
import two_level_cases as cases
from hypothesis import given
from hypothesis import strategies as st

from contracts.strategies import devices
from contracts.strategies.registry import TINY
from contracts.strategies.test_devices import QUICK, STRATEGIES
from helpers import accelerator
from helpers.pool import Pool
from wingbeat.collectives.two_level import columns_of
from wingbeat.transport import loopback
from wingbeat.transport.host_group import open_host_group
from wingbeat.types import Group, Layout

DEADLINE = 100.0
SEEDS = range(3)

needs_device = pytest.mark.skipif(bool(accelerator.why_not()), reason=accelerator.why_not())


@pytest.fixture(scope="module")
def workers() -> Iterator[Pool]:
    made = Pool(4)
    yield made
    made.close()


@pytest.fixture
def hosts(workers: Pool) -> Pool:
    """Two hosts with two workers each. A failed case has ended them."""
    workers.run(cases.join, "0011", deadline=DEADLINE)
    return workers


KINDS = ["all_reduce", "reduce_scatter", "all_gather", "halves"]


@needs_device
@pytest.mark.parametrize("wire", [None, torch.bfloat16], ids=["plain", "bfloat16"])
@pytest.mark.parametrize("what", KINDS)
def test_collective_on_two_levels_equals_that_of_host_memory_without_host_waits(
    hosts: Pool, what: str, wire: torch.dtype | None
) -> None:
    used = hosts.run(cases.equals_host_memory, what, wire, SEEDS, deadline=DEADLINE)
    whole = {"all_reduce": 5, "halves": 6}.get(what, 3)  # of the sizes, those that blocks divide
    assert used == [len(SEEDS) * whole] * 4


@needs_device
def test_each_rank_copies_its_share_of_a_buffer_to_its_host_and_back(hosts: Pool) -> None:
    share, block = 8000, 4000  # bytes, of 16000: of 2 ranks on each host, and of 4 ranks
    wanted = {
        "all_reduce": (share, share),
        "reduce_scatter": (share, block),
        "all_gather": (block, share),
    }
    for what, copied in wanted.items():
        assert hosts.run(cases.bytes_copied, what, 4000, deadline=DEADLINE) == [copied] * 4


@needs_device
def test_kinds_and_dtypes_in_turn_equal_those_of_host_memory(hosts: Pool) -> None:
    hosts.run(cases.kinds_in_turn, range(6), deadline=DEADLINE)


@needs_device
@pytest.mark.parametrize("what", ["all_reduce", "reduce_scatter", "halves"])
def test_sketch_of_shards_equals_that_of_host_memory_with_its_residual(
    hosts: Pool, what: str
) -> None:
    hosts.run(cases.sketch_equals_host_memory, what, SEEDS, deadline=DEADLINE)


@needs_device
def test_first_half_that_has_ended_is_written_before_the_second(hosts: Pool) -> None:
    hosts.run(cases.first_half_writes_nothing_later, range(6), deadline=DEADLINE)


@needs_device
def test_memory_of_buffers_that_nobody_waits_for_is_released_after_use(hosts: Pool) -> None:
    hosts.run(cases.memory_is_released_after_use, SEEDS, deadline=DEADLINE)


@needs_device
def test_channel_is_closed_after_a_gather_that_has_begun(hosts: Pool) -> None:
    hosts.run(cases.close_ends_after_a_gather_that_has_begun, deadline=DEADLINE)


@needs_device
def test_closed_channel_leaves_no_process_group(hosts: Pool) -> None:
    assert hosts.run(cases.groups_left, deadline=DEADLINE) == [0] * 4


@needs_device
@pytest.mark.parametrize("strategy", ["allreduce:mb=0.0001", "dear:mb=0.0001"])
def test_training_thread_never_waits_for_the_device(hosts: Pool, strategy: str) -> None:
    assert hosts.run(devices.waits_on_late_device, strategy, deadline=DEADLINE) == [0] * 4


@needs_device
@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        pytest.param(name, strategy, marks=() if number == turn else pytest.mark.slow)
        for number, name in enumerate(QUICK)
        for turn, strategy in enumerate(STRATEGIES)
    ],
)
def test_scenario_on_two_hosts_equals_the_reference(hosts: Pool, name: str, strategy: str) -> None:
    seeds = range(9000, 9002)
    used = hosts.run(cases.scenario, name, strategy, TINY, seeds, deadline=DEADLINE)
    assert min(used) > 0


@needs_device
def test_ranks_that_wait_in_different_orders_are_named(hosts: Pool) -> None:
    said = hosts.run(cases.other_order, deadline=DEADLINE)
    for rank, text in enumerate(said):
        peer = rank ^ 1
        steps = ["all-gather 1 (all-reduce of bucket 0)", "reduce-scatter 2 (all-reduce of bucket"]
        assert text.startswith(
            f"rank {rank}: the next collective on this host is {steps[rank % 2]}"
        ), text
        assert f" on rank {peer}: all ranks must use the gradients" in text


@needs_device
def test_layouts_in_other_orders_and_uneven_ones_equal_host_memory(hosts: Pool) -> None:
    for placing, two_level in (("0110", True), ("0101", True), ("0001", False)):
        hosts.run(cases.join, placing, deadline=DEADLINE)
        used = hosts.run(cases.equals_host_memory, "halves", None, range(1), deadline=DEADLINE)
        assert used == [6 if two_level else 0] * 4


@needs_device
def test_rank_that_dies_is_named_on_all_hosts(fresh_pool: Callable[..., Pool]) -> None:
    made = fresh_pool(4, default_group=True)
    made.run(cases.join, "0011", 5.0, deadline=DEADLINE)
    found = made.outcomes(cases.one_dies, deadline=DEADLINE, grace=40.0)
    assert found[3].kind == "died"
    said = [each.value for each in found[:3]]
    assert all("rank 3" in said[rank] for rank in (1, 2)), said
    assert "rank 1" in said[0] or "rank 2" in said[0], said  # which have lost rank 3


def test_group_has_no_nccl_where_its_job_has_none() -> None:
    """Columns of the hosts carry tensors of CUDA devices with ``cuda="tcp"``."""
    members = loopback.worlds(2, layout=Layout([0, 1]))
    for world in members:
        world.nccl_devices = frozenset()
    opened = [world.open_group(Group((0, 1), 1)) for world in members]
    assert [group.nccl_devices for group in opened] == [frozenset()] * 2
    for world in members:
        world.close()


layouts = (
    st.tuples(st.integers(1, 4), st.integers(1, 4))
    .flatmap(
        lambda shape: st.permutations([host for host in range(shape[0]) for _ in range(shape[1])])
    )
    .map(Layout.by_name)
)


@given(layouts)
def test_shards_of_a_host_have_the_blocks_of_their_columns(layout: Layout) -> None:
    columns = columns_of(layout)
    assert sorted(rank for column in columns for rank in column) == list(range(layout.workers))
    for place, column in enumerate(columns):
        assert column == tuple(sorted(column))  # as groups number their members
        assert {layout.host_of[rank] for rank in column} == set(range(len(layout.hosts)))
        assert all(layout.hosts[layout.host_of[rank]].index(rank) == place for rank in column)


@pytest.mark.parametrize(
    ("host_of", "why"),
    [
        ([0, 0, 0, 1], "hosts have different numbers of workers, 1 and 3"),
        ([0, 0, 1, 1], "rank 0: torch's default group does not have the ranks of the job"),
    ],
)
def test_without_a_group_on_each_host_all_ranks_are_told_the_same(
    caplog: pytest.LogCaptureFixture, host_of: list[int], why: str
) -> None:
    caplog.set_level(logging.WARNING)
    members = loopback.worlds(4, layout=Layout(host_of))
    device = torch.device("cuda", 0)
    assert loopback.run(members, lambda world: open_host_group(world, device)) == [None] * 4
    assert [each.message for each in caplog.records] == [
        "tensors on cuda are not summed inside hosts, and each process copies whole buckets to "
        f"its host, because {why}"
    ]
    for world in members:
        world.close()
