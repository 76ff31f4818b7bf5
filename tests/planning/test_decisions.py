"""What one training has found out is kept by the next one, from its first iteration on."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest

import wingbeat
from helpers.training import backward, engine, net, sgd
from wingbeat.planning import measure as measuring
from wingbeat.planning.control import Decisions
from wingbeat.planning.measure import Samples
from wingbeat.strategies import MGWFBP
from wingbeat.transport import loopback

KB = 2.0**-10
TUNED = {"mb": 0.5 * KB, "min_mb": 0.1 * KB, "max_mb": KB, "edge_mb": 0, "trials": 3, "steps": 1}
MOST = 60
"""Iterations within which all of these have decided."""

FREE = Samples(
    encode=tuple((float(n), 0.0) for n in (1000, 2000, 4000)),
    exchange=tuple((float(n), 1e-3 * n) for n in (1000, 2000, 4000)),
)
"""Nothing but bytes counts: the more buckets, the sooner the first begins."""


def train(
    world: Any, strategy: Any, known: Decisions | None = None, more: int = 2
) -> tuple[int, list[list[int]], Decisions]:
    """Iterations until it is decided, the buckets in the iterations after that, the decisions."""
    model = net()
    model, optimizer = wingbeat.distribute(model, sgd(model.parameters()), strategy, world=world)
    control = engine(model).control
    if known is not None:
        control.keep(known)

    def iterate(number: int) -> list[int]:
        optimizer.zero_grad()
        backward(model, world.rank, number)
        optimizer.step()
        return [bucket.numel for bucket in engine(model).buckets]

    deciding = 0
    while control.deciding() and deciding < MOST:
        iterate(deciding)
        deciding += 1
    sizes = [iterate(deciding + i) for i in range(more)]
    wingbeat.release(model, optimizer)
    return deciding, sizes, control.decisions()


def on(strategy: Any, known: list[Decisions] | None = None) -> list[Any]:
    return loopback.run(
        loopback.worlds(2),
        lambda world: train(world, strategy, known and known[world.rank]),
    )


def test_decisions_are_final_only_after_tuning() -> None:
    found = on(wingbeat.DeAR(**TUNED))
    assert len({deciding for deciding, *_ in found}) == 1
    assert TUNED["trials"] * 3 <= found[0][0] < MOST
    assert [own.coded for *_, own in found] == [None] * 2
    [size] = {own.bucket_bytes for *_, own in found}
    assert found[0][2].to_json() == {"bucket_bytes": size}


@pytest.mark.parametrize("size", [150, 900])
def test_decisions_size_is_kept(size: int) -> None:
    known = [Decisions(bucket_bytes=size)] * 2
    found = on(wingbeat.DeAR(**TUNED), known)
    expected = on(wingbeat.DeAR(**{**TUNED, "plan": "fixed", "mb": size / 2**20}))
    assert [sizes for _, sizes, _ in found] == [sizes for _, sizes, _ in expected]
    assert [(deciding, own) for deciding, _, own in found] == [(0, known[0])] * 2


@pytest.mark.parametrize("coded", [True, False])
def test_decisions_compression_is_kept_and_size_is_tuned(coded: bool) -> None:
    known = [Decisions(coded=coded)] * 2
    found = on(wingbeat.AllReduce(compression="sketch"), known)
    assert [(deciding, own) for deciding, _, own in found] == [(0, known[0])] * 2
    assert known[0].to_json() == {"codec": "on" if coded else "off"}
    tuned = on(wingbeat.DeAR(compression="sketch", **TUNED), known)
    assert all(0 < deciding < MOST for deciding, *_ in tuned)
    assert all(own.coded is coded and own.bucket_bytes for *_, own in tuned)


def test_decisions_merge_plan_is_kept_without_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    few = functools.partial(measuring.measure_links, largest_bytes=4096, repeats=1)
    monkeypatch.setattr(measuring, "measure_links", few)
    measured: list[int] = []

    def measure(*_args: Any, **_options: Any) -> Samples:
        measured.append(1)
        return FREE

    monkeypatch.setattr(measuring, "measure_wire", measure)
    strategy = MGWFBP(steps=1)
    first = on(strategy)
    assert len(measured) == 2
    assert first[0][0] > 0
    known = [own for *_, own in first]
    second = on(strategy, known)
    assert len(measured) == 2
    assert [deciding for deciding, *_ in second] == [0, 0]
    assert [sizes for _, sizes, _ in second] == [sizes for _, sizes, _ in first]
    buckets = len(first[0][1][0])
    assert buckets > 1
    assert known[0].to_json() == second[0][2].to_json() == {"buckets": buckets}


def test_decisions_without_control_are_empty() -> None:
    found = on(wingbeat.AllReduce(mb=KB), [Decisions(coded=False, bucket_bytes=100)] * 2)
    fields = dataclasses.asdict(found[0][2])
    assert found[0][0] == 0
    assert set(fields.values()) == {None}
