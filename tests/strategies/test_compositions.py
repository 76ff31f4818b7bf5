"""Every sensible composition trains, and does what its traits say."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch

import wingbeat
from helpers.training import TINY_MB, adamw, batch, engine, net, train, weights
from wingbeat import Strategy, parts
from wingbeat.observe.events import stream
from wingbeat.transport import loopback
from wingbeat_lab import baselines

SIZE, STEPS = 2, 3
LONG = 12
"""Steps in which layers are measured and merged twice."""

PLANS: dict[str, parts.PlanPart] = {
    "fixed": parts.FixedBuckets(mb=TINY_MB),
    "tuned": parts.TunedBuckets(
        search="grid", mb=TINY_MB, min_mb=TINY_MB / 2, max_mb=8 * TINY_MB, trials=3, steps=1
    ),
    "layers": parts.Layers(count=2),
    "elements": parts.Elements(count=50),
    "none": parts.PerTensor(),
    "one": parts.OneBucket(),
    "merged": parts.Merged(steps=1),
}
SCHEDULES = {"wfbp": ("whole",), "dear": ("deferred", "sharded")}
MANNERS = [(schedule, update) for schedule, all_ in SCHEDULES.items() for update in all_]
WIRES = {
    "bf16": "bf16",
    "fp16": parts.Half(),
    "sketch": parts.Sketch(bits=4, auto_disable=False),
    "topk": parts.TopK(density=0.2, warmup=0, auto_disable=False),
    "lowrank": parts.LowRank(rank=1, auto_disable=False),
}


def together(strategy: Any, steps: int = STEPS) -> list[dict[str, torch.Tensor]]:
    """Each rank's weights after training on its own batches."""

    def body(world: Any) -> dict[str, torch.Tensor]:
        model = net()
        optimizer = adamw(model.parameters())
        model, optimizer = wingbeat.distribute(model, optimizer, strategy, world=world)
        train(model, optimizer, range(steps))
        planned = engine(model).merging
        assert planned is None or steps < LONG or planned.report() is not None
        wingbeat.release(model, optimizer)
        return weights(model)

    worlds = loopback.worlds(SIZE, timeout=20.0)
    try:
        return loopback.run(worlds, body)
    finally:
        for world in worlds:
            world.close()


@functools.cache
def alone(steps: int = STEPS) -> dict[str, torch.Tensor]:
    """The weights of one process that sees everybody's batches: what is exact comes to these."""
    model = net()
    optimizer = adamw(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(SIZE):
            (model(batch(step, rank)).square().mean() / SIZE).backward()
        optimizer.step()
    return weights(model)


def furthest(found: dict[str, torch.Tensor], steps: int = STEPS) -> float:
    """The largest difference from one process's weights, relative to the largest of a tensor."""
    return max(
        float((found[name] - want).abs().max() / want.abs().max().clamp(min=1e-3))
        for name, want in alone(steps).items()
    )


def assert_all_alike(found: list[dict[str, torch.Tensor]]) -> None:
    for other in found[1:]:
        assert all(torch.equal(other[name], found[0][name]) for name in other)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("schedule", "update"), MANNERS)
def test_any_plan_with_any_schedule_and_update(plan: str, schedule: str, update: str) -> None:
    strategy = Strategy(plan=PLANS[plan], schedule=schedule, update=update)
    steps = LONG if plan in ("merged", "tuned") else STEPS
    found = together(strategy, steps)
    assert strategy.traits.exact
    assert_all_alike(found)
    assert furthest(found[0], steps) < 1e-4


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(("schedule", "update"), MANNERS)
def test_any_wire_with_any_schedule_and_update(wire: str, schedule: str, update: str) -> None:
    strategy = Strategy(
        plan=parts.Layers(count=2), compression=WIRES[wire], schedule=schedule, update=update
    )
    found = together(strategy)
    assert not strategy.traits.exact
    assert_all_alike(found)


@pytest.mark.parametrize(
    ("wire", "plan"), [*itertools.product(("sketch", "topk", "bf16"), ("merged", "tuned"))]
)
@pytest.mark.parametrize(("schedule", "update"), MANNERS)
def test_what_is_measured_while_training_goes_with_codecs(
    wire: str, plan: str, schedule: str, update: str
) -> None:
    strategy = Strategy(plan=PLANS[plan], compression=WIRES[wire], schedule=schedule, update=update)
    assert_all_alike(together(strategy, LONG))


@pytest.mark.parametrize("exchange", ["ring", "mesh", "doubling", "bcube"])
@pytest.mark.parametrize(("schedule", "update"), MANNERS)
def test_any_exchange_with_any_schedule(exchange: str, schedule: str, update: str) -> None:
    strategy = Strategy(plan="one", exchange=exchange, schedule=schedule, update=update)
    found = together(strategy)
    assert_all_alike(found)
    assert furthest(found[0]) < 1e-4


@pytest.mark.parametrize("name", baselines.PRESETS)
def test_a_preset_that_says_it_is_exact_is_and_no_other(name: str) -> None:
    preset = baselines.PRESETS[name]()
    found = together(preset)
    if preset.traits.synchronous:
        assert_all_alike(found)
    off = furthest(found[0])
    assert off < 1e-4 if preset.traits.exact else off > 1e-3


@pytest.mark.parametrize("name", [*baselines.PRESETS, "strategy:schedule=dear,update=sharded"])
def test_updates_in_parts_are_recorded_one_by_one(name: str) -> None:
    """A bench takes ``step()`` for the update of whoever has no such trait."""
    strategy = baselines.parse(name)

    def body(world: Any) -> None:
        model = net()
        model, optimizer = wingbeat.distribute(
            model, adamw(model.parameters()), strategy, world=world
        )
        train(model, optimizer, range(2))
        wingbeat.release(model, optimizer)

    worlds = loopback.worlds(SIZE, timeout=20.0)
    stream.start(0)
    try:
        loopback.run(worlds, body)
    finally:
        events = stream.stop()
        for world in worlds:
            world.close()
    assert any(event.what == "update" for event in events) == strategy.traits.in_parts
