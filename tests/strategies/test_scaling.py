"""A model at half its size with strategies at half theirs: tensors travel together as before."""

from __future__ import annotations

import dataclasses
import random

import pytest

import wingbeat
import wingbeat_lab
from wingbeat import Strategy
from wingbeat.parts import Servers
from wingbeat.parts.names import PLANS
from wingbeat.planning import plans
from wingbeat.types import Plan, TensorSpec
from wingbeat_lab import baselines

COMPOSED: dict[str, Strategy] = {
    **{name: preset() for name, preset in baselines.PRESETS.items()},
    **{f"plan={name}": Strategy(plan=name, schedule="dear") for name in PLANS},
    "allreduce:mb=7": wingbeat.AllReduce(mb=7.0, first_mb=0.25),
    "dear:mb=9": wingbeat.DeAR(mb=9.0, edge_mb=2.0, min_mb=0.5, max_mb=30.0),
    "mgs:elements=99999": wingbeat_lab.MGS(elements=99_999),
}


def specs(scale: float) -> list[TensorSpec]:
    """130 MB in tensors of 512 bytes to 16 MB, each an even number of elements at scale 1."""
    rng = random.Random(0)
    numels = [2 * round(2 ** rng.uniform(6, 21)) for _ in range(80)]
    return [TensorSpec(str(i), (int(scale * n),), "float32", 4) for i, n in enumerate(numels)]


def plans_of(strategy: Strategy, scale: float) -> list[Plan]:
    """The plan that training begins with, and those of the sizes at both ends of a tuning."""
    made = strategy.scaled(scale)
    fusions = [made.plan.fusion()]
    if made.plan.tuning() is not None:
        ends = (made.plan.tuning().low_bytes, made.plan.tuning().high_bytes)
        fusions += [dataclasses.replace(made.plan.fusion(), bucket_bytes=size) for size in ends]
    if made.plan.choosing() is not None:
        fusions += [each.fusion for each in made.plan.choosing().candidates("mesh")]
    tensors = specs(scale)
    return [plans.make_plan(fusion, tensors, range(len(tensors))[::-1]) for fusion in fusions]


@pytest.mark.parametrize("name", COMPOSED)
def test_a_scaled_model_has_the_same_buckets(name: str) -> None:
    assert plans_of(COMPOSED[name], 0.5) == plans_of(COMPOSED[name], 1.0)


def test_slices_follow_the_model_and_none_stays_none() -> None:
    def elements(strategy: Strategy) -> int:
        servers = strategy.scaled(0.05).exchange
        assert isinstance(servers, Servers)
        return servers.slice

    assert elements(wingbeat.Geryon()) == 52_429
    assert elements(wingbeat.Geryon(slice=8)) == 1
    assert elements(wingbeat.Geryon(slice=0)) == 0
