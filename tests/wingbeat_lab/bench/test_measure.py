"""Workers measure what they alone and the links alone take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest

import wingbeat
from helpers.pool import Pool
from wingbeat_lab.bench import measure
from wingbeat_lab.bench.config import BenchConfig
from wingbeat_lab.bench.speedup import Timings, measured

CONFIG = BenchConfig(
    lab="loopback:2", model="paced:resnet50@0.02", strategies=("dear",), iterations=1, rounds=1
)


def measured_on_this_worker() -> dict[str, Any]:
    world = wingbeat.init(timeout=30.0)
    try:
        return asdict(measure.timings(CONFIG.check(), world))
    finally:
        wingbeat.shutdown()


@pytest.fixture
def pool(fresh_pool: Callable[..., Pool]) -> Pool:
    return fresh_pool(2)


def test_both_halves_and_both_passes_are_measured(pool: Pool) -> None:
    raw = pool.run(measured_on_this_worker)
    workers = [Timings(**each) for each in raw]
    checked = CONFIG.check()
    made = measured([workers], bucket_bytes=checked.bucket_bytes)
    assert made is not None
    stated = checked.model.compute_s()
    profile = checked.model.profile
    assert stated is not None
    assert profile is not None
    # Sleeping is never shorter than asked for; how much longer depends on the machine.
    assert made.t_ff_s >= 0.99 * stated[0]
    assert made.t_bp_s >= 0.99 * stated[1]
    assert made.nbytes == profile.nbytes
    assert len(made.samples_s["forward"]) == 2 * measure.PASSES
    for half in ("reduce_scatter", "all_gather"):
        for way in ("whole", "buckets"):
            times = made.samples_s[f"{half}/{way}"]
            assert len(times) == measure.REPETITIONS
            assert min(times) > 0


def normal_on_this_worker() -> list[float]:
    world = wingbeat.init(timeout=30.0)
    try:
        models = ("paced:resnet50@0.02", "digits")
        return [measure.normal_s(replace(CONFIG, model=model).check(), world) for model in models]
    finally:
        wingbeat.shutdown()


def test_a_normal_iteration_is_the_stated_computation_or_a_measured_one(pool: Pool) -> None:
    first, second = pool.run(normal_on_this_worker)
    assert first == second  # the slowest worker's
    assert first[0] == sum(CONFIG.check().model.compute_s() or ())
    assert 0 < first[1] < 1
