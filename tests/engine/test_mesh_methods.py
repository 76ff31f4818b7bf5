"""Servers, bounded staleness and partial exchange between replicas of several processes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import mesh_cases
import mesh_method_cases as cases
import pytest

from helpers.amounts import slow_except
from helpers.pool import Pool

SIZE = 4


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("geryon", marks=pytest.mark.slow),
        pytest.param("geryon:pull=start", marks=pytest.mark.slow),
        "geryon:update=server",
        "canary:s=0",
        pytest.param("bytescheduler:partition_mb=0.0001", marks=pytest.mark.slow),
    ],
)
def test_exact_method_over_fsdp2_equals_hsdp(job: Pool, strategy: str) -> None:
    differences = job.run(mesh_cases.difference_to_hsdp, strategy, 10, {})
    assert max(differences) < 1e-6, differences


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["geryon:update=server", "canary:s=0"])
def test_each_use_of_fsdp2_equals_hsdps(job: Pool, strategy: str) -> None:
    for found in job.run(mesh_cases.variants, strategy, 4, deadline=150.0):
        wrong = {name: by for name, by in found.items() if not by < 1e-6}
        assert found.keys() == mesh_cases.VARIANTS.keys()
        assert not wrong


@pytest.mark.parametrize(
    "strategy",
    slow_except(["geryon:update=server"], ["geryon", "geryon:update=server", "canary:s=0"]),
)
def test_tensor_parallel_replicas_equal_one_process(job: Pool, strategy: str) -> None:
    differences = job.run(mesh_cases.tensor_parallel, strategy, False, 2, 10)
    assert max(differences) < 1e-6, differences


def test_state_on_servers_is_that_of_workers_and_loads(job: Pool) -> None:
    """Also of a bias of which one rank has no element."""
    for on_workers, on_servers in job.run(cases.served_states):
        for state, plain in zip(on_servers[0], on_workers[0], strict=True):
            assert {key: kind for key, (kind, _) in state.items()} == {
                "exp_avg": "DTensor", "exp_avg_sq": "DTensor", "step": "Tensor"
            }  # fmt: skip
            for key, (_, values) in state.items():
                assert values == pytest.approx(plain[key][1], rel=1e-5, abs=1e-9), key
        for _, continued, loaded, kinds in (on_workers, on_servers):
            assert loaded == pytest.approx(continued, rel=1e-6)
            assert continued == pytest.approx(on_workers[1], rel=1e-6)
            assert kinds == ["DTensor", "Tensor"]


def test_gather_of_fully_shard_sees_the_update_of_the_servers(job: Pool) -> None:
    assert job.run(cases.pending_reads) == [[True, True]] * SIZE


def test_warning_is_logged_by_rank_0_alone(job: Pool) -> None:
    first, *others = job.run(cases.warned)
    assert [line for line in first if "no priorit" in line or "prioritized" in line]
    assert not [line for lines in others for line in lines if "prioritized" in line]


BOUNDS: dict[str, dict[str, Any]] = {
    "waits": {"s": 2, "p": None, "compression": "fp32"},
    "drops": {"s": 1, "p": 2, "colayers": 3},
    "unbounded": {"s": None, "p": None},
}


@pytest.mark.parametrize("bound", slow_except(["drops"], BOUNDS))
def test_slow_rank_with_fewer_steps_neither_stops_nor_spoils_training(
    job: Pool, bound: str
) -> None:
    """The other rank of its replica is not slow in its own column."""
    found = job.run(cases.stale, BOUNDS[bound], 60, 3)
    for first, last, trained, fired in found:
        assert last < 0.5 * first
        assert trained == found[0][2]
        assert bound == "drops" or not fired["dropped"]


def test_partial_exchange_between_replicas_trains(job: Pool) -> None:
    for first, last in job.run(cases.partial, 40):
        assert last < 0.5 * first


def test_killed_rank_takes_its_replica_and_the_others_train_on(
    fresh_pool: Callable[..., Pool],
) -> None:
    pool = fresh_pool(6, default_group=True)
    outcomes = pool.outcomes(cases.killed, "canary:s=2,p=none", 3, 5, 40, grace=50.0)
    assert outcomes[5].kind == "died"
    assert [each.kind for each in outcomes[:5]] == ["ok"] * 5, outcomes
    ended, trained = outcomes[4].value, [each.value for each in outcomes[:4]]
    assert re.search(r"rank 4: .*replica 2 \(ranks 4, 5\)", ended[0]), ended
    assert ended[1] < 20.0
    assert [each[0] for each in trained] == ["trained"] * 4
    assert all(each[1] == trained[0][1] for each in trained)


@pytest.mark.parametrize(
    "strategy", slow_except(["canary:s=0"], ["geryon", "geryon:update=server", "canary:s=0"])
)
def test_killed_rank_ends_synchronous_training_on_all_and_is_named(
    fresh_pool: Callable[..., Pool], strategy: str
) -> None:
    pool = fresh_pool(SIZE, default_group=True)
    outcomes = pool.outcomes(cases.killed, strategy, 2, 3, 40, grace=50.0)
    assert [each.kind for each in outcomes] == ["ok"] * 3 + ["died"], outcomes
    words, seconds = zip(*(each.value for each in outcomes[:3]), strict=True)
    assert all("rank 3" in text for text in words[1:]), words
    assert max(seconds) < 20.0
