"""Workers measure what they alone and the links alone take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import wingbeat
from helpers.pool import Pool
from wingbeat_lab.bench import measure
from wingbeat_lab.bench.config import BenchConfig
from wingbeat_lab.bench.measure import HALVES, WAYS, Measured, Timings, measured


def timings(late: float = 0.0, **seconds: float) -> Timings:
    """One worker that begins ``late`` and whose repetitions end after ``seconds`` by half_way."""
    keys = [(half, way) for half in HALVES for way in WAYS]
    spans = {f"{h}/{w}": [(late, seconds.get(f"{h}_{w}", 5.0))] for h, w in keys}
    return Timings([seconds.get("forward", 1.0)], [seconds.get("backward", 2.0)], spans, 400)


def of(*rounds: list[Timings]) -> Measured:
    made = measured(rounds, bucket_bytes=100)
    assert made is not None
    return made


def test_the_bound_is_the_denominator_of_equation_6() -> None:
    # t_ff 1, t_bp 2, t_rs 1.5 (hidden), t_ag 3 (not hidden): 3 + 2.
    made = of([timings(reduce_scatter_whole=1.5, all_gather_buckets=3.0)] * 4)
    assert (made.t_ff_s, made.t_bp_s, made.t_rs_s, made.t_ag_s) == (1.0, 2.0, 1.5, 3.0)
    assert made.bound_s == 5.0
    assert made.s_max == pytest.approx(4 * 3.0 / 5.0)
    assert made.speedup(6.0) == pytest.approx(4 * 3.0 / 6.0)
    assert made.faster == {"reduce_scatter": "whole", "all_gather": "buckets"}


def test_measured_speedup_on_free_links_is_linear() -> None:
    free = {f"{half}_{way}": 0.001 for half in HALVES for way in WAYS}
    assert of([timings(**free)] * 64).s_max == pytest.approx(64)


def test_measured_times_are_those_of_the_slowest_worker() -> None:
    made = of([timings(forward=1.0, backward=7.0), timings(forward=3.0, backward=2.0)])
    assert (made.t_ff_s, made.t_bp_s) == (3.0, 7.0)


def test_a_collective_lasts_from_the_last_begin_to_the_last_end() -> None:
    early = timings(late=0.0, all_gather_whole=1.2, all_gather_buckets=9.0)
    late = timings(late=0.5, all_gather_whole=2.0, all_gather_buckets=9.0)
    assert of([early, late]).t_ag_s == pytest.approx(1.5)


def test_medians_are_over_all_rounds() -> None:
    rounds = [[timings(forward=f, all_gather_whole=f)] * 2 for f in (1.0, 2.0, 30.0)]
    made = of(*rounds)
    assert (made.t_ff_s, made.t_ag_s) == (2.0, 2.0)
    assert made.samples_s["forward"] == [1.0, 2.0, 30.0] * 2
    assert made.samples_s["all_gather/whole"] == [1.0, 2.0, 30.0]


def test_measured_without_timings_is_none() -> None:
    assert measured([], bucket_bytes=1) is None


seconds = st.floats(0.001, 100.0)


@given(forward=seconds, backward=seconds, rs=seconds, ag=seconds, workers=st.integers(1, 9))
def test_no_speedup_beyond_the_number_of_workers(
    forward: float, backward: float, rs: float, ag: float, workers: int
) -> None:
    own = timings(
        forward=forward,
        backward=backward,
        reduce_scatter_whole=rs,
        reduce_scatter_buckets=rs,
        all_gather_whole=ag,
        all_gather_buckets=ag,
    )
    made = of([own] * workers)
    assert 0 < made.s_max <= workers + 1e-9
    assert made.speedup(made.bound_s) == pytest.approx(made.s_max)


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
