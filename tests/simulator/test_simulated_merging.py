"""Layers merged by simulated costs: no slower than fixed plans, fewer where starts cost much."""

from __future__ import annotations

import pytest

from wingbeat.simulator import Links, Run, Work, simulate
from wingbeat_lab import baselines, paced

MODEL = paced.simulator_model(paced.parse("paced:resnet50@0.02"))


def run(
    strategy: str, latency_s: float = 100e-6, bytes_per_s: float = 12.5e6, **work: float
) -> Run:
    links = Links(bytes_per_s=bytes_per_s, latency_s=latency_s)
    return simulate(MODEL, baselines.parse(strategy), 4, links, work=Work(**work), iterations=3)


def buckets(made: Run) -> int:
    return len({bucket for _, _, _, bucket in made.trace if bucket >= 0})


@pytest.mark.parametrize("row", ["allreduce:{}", "dear:{}", "allreduce:{},compression=topk@0.01"])
@pytest.mark.parametrize("latency_s", [0.0, 20e-3])
def test_a_tried_plan_is_no_slower_than_fixed_ones(row: str, latency_s: float) -> None:
    merged = run(row.format("plan=merged"), latency_s).median_s
    fixed = [run(row.format(plan), latency_s).median_s for plan in ("plan=fixed,mb=100", "mb=0.02")]
    assert merged <= 1.02 * min(fixed)
    assert merged < 0.99 * max(fixed)


def test_starts_that_take_long_make_fewer_buckets() -> None:
    quick, long = (
        buckets(run("allreduce:plan=merged@exact", latency_s)) for latency_s in (1e-6, 50e-3)
    )
    assert 1 <= long < quick


@pytest.mark.parametrize("strategy", ["allreduce:plan=merged@exact", "dear:plan=merged@exact"])
def test_starts_that_occupy_the_training_thread_make_fewer_buckets(strategy: str) -> None:
    quick, long = (buckets(run(strategy, 20e-6, start_s=seconds)) for seconds in (0.0, 20e-3))
    assert 1 <= long < quick


def test_an_expensive_codec_makes_other_buckets() -> None:
    name = "omgs:merge=paper,warmup=0"
    cheap, dear = (buckets(run(name, 1e-3, 125e6, codecs=factor)) for factor in (0.01, 300.0))
    assert cheap != dear
