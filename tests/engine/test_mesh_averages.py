"""Models averaged between replicas of several processes: LocalSGD, DiLoCo and Ripples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mesh_average_cases as cases
import pytest

from helpers.amounts import slow_except
from helpers.pool import Pool

SIZE = 4


EXACT: dict[str, dict[str, Any]] = {
    "localsgd:every=3": {"every": 3},
    "localsgd:every=1": {"every": 1},
    "localsgd:every=3,overlap=true": {"every": 3, "delay": 1},
    "diloco:every=3": {"every": 3, "lr": 0.7, "momentum": 0.9},
    "diloco:every=4,delay=2": {"every": 4, "lr": 0.7, "momentum": 0.9, "delay": 2},
}


@pytest.mark.parametrize(
    "strategy", slow_except(["localsgd:every=3,overlap=true", "diloco:every=3"], EXACT)
)
def test_averages_over_fsdp2_equal_one_process(job: Pool, strategy: str) -> None:
    differences = job.run(cases.compared_with_one_process, strategy, 20, EXACT[strategy])
    assert max(map(max, differences)) < 1e-6, differences


@pytest.mark.parametrize(
    "strategy",
    slow_except(["diloco:every=4,delay=2"], ["localsgd:every=3", "diloco:every=4,delay=2"]),
)
def test_averages_over_tensor_parallelism_equal_one_process(job: Pool, strategy: str) -> None:
    options = {**EXACT[strategy], "ranks": 1}
    differences = job.run(cases.compared_with_one_process, strategy, 20, options)
    assert max(map(max, differences)) < 1e-6, differences


USES = [
    "localsgd:every=2,average_state=true",
    "localsgd:every=2,compression=sketch",
    "localsgd:every=2,compression=bf16",
    "diloco:every=3,compression=topk:density=0.2",
    "ripples:policy=static",
]


@pytest.mark.parametrize(
    "strategy",
    slow_except(["ripples:policy=static", "localsgd:every=2,compression=sketch"], USES),
)
def test_synchronized_replicas_agree_and_continue_from_their_state(
    job: Pool, strategy: str
) -> None:
    found = job.run(cases.uses, strategy, 6)
    for weights, buffers, _, result, again in found:
        assert weights == found[0][0]
        assert buffers == found[0][1]
        assert result == found[0][3]
        assert again < 1e-6
    assert (found[3][2] == found[0][2]) == ("state" in strategy)


@pytest.fixture(scope="module")
def six() -> Iterator[Pool]:
    """Six processes: three replicas."""
    pool = Pool(6, default_group=True)
    yield pool
    pool.close()


QUORUM = "diloco:every=3,quorum=2,grace=0.05,weights=tokens"


@pytest.mark.parametrize(
    "strategy",
    slow_except(["ripples"], ["ripples", "ripples:overlap=true", "localsgd:every=2", QUORUM]),
)
def test_slow_replica_and_uneven_steps_end_with_equal_models(six: Pool, strategy: str) -> None:
    found = six.run(cases.groups, strategy, 3, 18, 0.0 if "localsgd" in strategy else 0.05)
    assert all(after == found[0][1] for _, after in found)
    assert found[0][0] == found[1][0], "ranks of one replica"


@pytest.mark.parametrize(
    ("strategy", "dying"),
    [
        pytest.param("ripples", 4, id="ripples-leader"),
        pytest.param("ripples", 5, id="ripples-follower", marks=pytest.mark.slow),
        pytest.param("localsgd:every=2", 4, id="localsgd-leader", marks=pytest.mark.slow),
        pytest.param("localsgd:every=2", 5, id="localsgd-follower", marks=pytest.mark.slow),
    ],
)
def test_replicas_continue_in_seconds_without_one_whose_rank_is_killed(
    fresh_pool: Callable[..., Pool], strategy: str, dying: int
) -> None:
    pool = fresh_pool(6, default_group=True)
    outcomes = pool.outcomes(cases.killed, strategy, dying, 6, 12, grace=30.0)
    assert outcomes[dying].kind == "died"
    other = outcomes[9 - dying].value
    assert other[0], "a replica cannot continue without a rank"
    assert other[1] < 15.0
    for each in outcomes[:4]:
        assert each.value[0] == "", each
        assert each.value[1] < 15.0
    assert outcomes[0].value[2] == outcomes[2].value[2]
    assert outcomes[1].value[2] == outcomes[3].value[2]


@pytest.mark.parametrize(
    "strategy", slow_except(["localsgd:every=2"], ["ripples", "localsgd:every=2"])
)
def test_replicas_continue_in_seconds_without_the_group_generator(six: Pool, strategy: str) -> None:
    found = six.run(cases.without_generator, strategy, 4, 12)
    assert sum(each[0] for each in found) == 1, "one generator was killed"
    assert max(each[1] for each in found) < 15.0
    for place in range(2):
        assert all(each[2] == found[place][2] for each in found[place::2])
