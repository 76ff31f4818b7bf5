"""The contract of strategies with parameters on an accelerator.

The accelerator of the suite (`helpers.accelerator`) runs its streams late, in an order of a seed.
The same scenarios run on a CUDA device with ``make test-gpu``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from helpers import accelerator
from helpers.pool import Pool

from . import devices
from .registry import (
    ALL,
    BOUND,
    CODED,
    LARGE,
    MEASURED,
    SCENARIOS,
    SERVED,
    SERVED_CODED,
    TINY,
)

DEADLINE = 170.0

STRATEGIES = (*ALL, *CODED)
"""The strategies of the quick run."""

EVERY = (*STRATEGIES, *MEASURED, *SERVED, *SERVED_CODED, *BOUND)

QUICK = (
    "no_sync_with_clipping",
    "two_backwards_without_no_sync",
    "route_unused_on_some_ranks_adamw",
    "batch_norm_with_accumulation",
    "clip_norm_2.0",
    "resume_adamw_loaded_after_steps",
    "right_after_step_parameters",
    "gradients_as_the_user_reads_them",
)
"""Scenarios of the quick run, which take turns with the strategies."""

SEEDS = 1000
"""Orders of streams in the slow run, over all scenarios."""

UNSUITABLE = {
    "the accelerator of tests has no complex or sparse tensors, and no autocast": (
        "complex_", "sparse_", "a_sparse_table", "autocast", "forward_under_autocast",
    ),
    "it draws random numbers in another order": (
        "dropout", "transformer_with_dropout", "an_optimizer_that_draws",
    ),
    "it has no fused kernels of recurrent layers": ("lstm", "gru"),
    "the scenario makes tensors, or reads parameters, on the CPU": (
        "digits_", "batch_norm_evaluated_on", "submodule_called_directly", "two_models_alternating",
        "two_models_and_gradients", "gradients_by_captured_parameters_numpy",
        "parameters_read_by_attribute", "one_rank_alone_records", "the_last_rank_alone_traces",
        "a_part_or_a_copy_is_scripted",
    ),
    "moving the model breaks what it tests": (
        "a_part_compiled_by_torchscript", "parameters_that_share_memory", "optimizer_adagrad",
        "resume_sgd_loaded_before", "resume_adamw_loaded_before",
    ),
}  # fmt: skip
"""Beginnings of the names of scenarios that do not run on the accelerator of tests, and why."""

WITHOUT = tuple(name for names in UNSUITABLE.values() for name in names)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    if accelerator.why_not():
        pytest.skip(accelerator.why_not())
    made = Pool(2)
    made.run(devices.load, deadline=DEADLINE)
    yield made
    made.close()


def run(pool: Pool, name: str, strategy: str, mb: float, seeds: range) -> None:
    case = devices.scenario_on_late_device
    pool.run(case, name, strategy, mb, seeds, deadline=DEADLINE)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("number", "name"), list(enumerate(QUICK)), ids=QUICK)
def test_scenario_on_a_late_device_equals_the_reference(
    pool: Pool, number: int, name: str, strategy: str
) -> None:
    if (number + STRATEGIES.index(strategy)) % 2:
        pytest.skip("the strategies take turns")
    seeds = range(10 * number, 10 * number + 2)
    run(pool, name, strategy, TINY if number % 3 else LARGE, seeds)


@pytest.mark.parametrize("strategy", ["geryon-start", "geryon-server"])
def test_scenario_of_servers_on_a_late_device_equals_the_reference(
    pool: Pool, strategy: str
) -> None:
    run(pool, "two_backwards_without_no_sync", strategy, TINY, range(7000, 7002))


def all_pairs() -> list[tuple[str, str]]:
    """Return every scenario that can run on a device, with strategies that take turns."""
    suitable = [case for case in SCENARIOS.values() if not case.name.startswith(WITHOUT)]
    pairs = []
    for turn, case in enumerate(case for case in suitable if 2 in case.grid.worlds):
        allowed = [each for each in EVERY if each in case.grid.strategies]
        pairs += [(case.name, allowed[turn % len(allowed)])] if allowed else []
    return pairs


EACH = -(-SEEDS // len(all_pairs()))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "strategy"), all_pairs())
def test_scenario_with_many_orders_of_streams_equals_the_reference(
    pool: Pool, name: str, strategy: str
) -> None:
    first = EACH * all_pairs().index((name, strategy))
    run(pool, name, strategy, TINY, range(first, first + EACH))


EXACT = (
    "localsgd:every=2,encrypted=false",
    "localsgd:every=2,overlap=true,encrypted=false",
    "localsgd:every=2,average_state=true,encrypted=false",
    "diloco:every=2,encrypted=false",
    "diloco:every=2,delay=1,encrypted=false",
    "canary:s=0,encrypted=false",
    "geryon:servers=1,encrypted=false",
    "geryon:servers=1,update=server,encrypted=false",
    "ako",
    "bytescheduler:partition_mb=0.00002,credit=2",
)
"""Strategies with which each worker's weights depend on nothing but its batches."""

MEAN = (
    ("ripples:encrypted=false", 0.5),
    ("ripples:policy=random,size=2,encrypted=false", 0.5),
    ("adpsgd:encrypted=false", 0.5),
    ("canary:s=10,encrypted=false", 0.0),
    ("canary:s=10,compression=sketch,encrypted=false", 0.0),
)
"""Strategies whose workers exchange when they come, and a momentum with which the mean is known."""


@pytest.mark.parametrize("strategy", EXACT)
def test_weights_of_each_step_on_a_late_device_are_those_on_the_cpu(
    pool: Pool, strategy: str
) -> None:
    seeds = range(5000, 5002)
    pool.run(devices.training_on_late_device, strategy, seeds, deadline=DEADLINE)


@pytest.mark.parametrize(
    "strategy",
    [
        "allreduce",
        "dear:plan=fixed",
        "dear:plan=fixed,shard_optimizer=true",
        "dear:plan=fixed,compression=sketch:auto_disable=false",
        "geryon:update=server,servers=1",
        "diloco:every=2",
    ],
)
def test_training_where_the_device_is_the_default_ends_with_the_same_state(
    pool: Pool, strategy: str
) -> None:
    pool.run(devices.with_the_device_as_default, strategy, deadline=DEADLINE)


@pytest.mark.parametrize(("strategy", "momentum"), MEAN)
def test_mean_of_models_on_a_late_device_is_that_of_all_steps(
    pool: Pool, strategy: str, momentum: float
) -> None:
    case = devices.mean_on_late_device
    pool.run(case, strategy, momentum, range(6000, 6002), deadline=DEADLINE)


@pytest.mark.parametrize(
    "strategy",
    [
        "allreduce:mb=0.0001",
        "dear:mb=0.0001",
        "geryon:servers=1,encrypted=false",
        "ako",
        "bytescheduler",
    ],
)
def test_training_thread_never_waits_for_the_device(pool: Pool, strategy: str) -> None:
    assert pool.run(devices.waits_on_late_device, strategy, deadline=DEADLINE) == [0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "strategy"), [each for each in all_pairs() if each[0] in QUICK])
def test_scenario_on_a_gpu_equals_the_reference(
    fresh_pool: Callable[..., Pool], name: str, strategy: str
) -> None:
    made = fresh_pool(2, default_group=True)
    made.run(devices.scenario_on_gpu, name, strategy, TINY, deadline=DEADLINE)
