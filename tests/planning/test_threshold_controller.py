"""Thresholds tuned while training: all workers change together, and no bit of the weights does."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import wingbeat
from helpers.training import TINY_MB, backward, engine, net, sgd
from wingbeat.errors import PeerError, UsageError
from wingbeat.methods.parameter_server.exchange import ServerExchange
from wingbeat.planning import files
from wingbeat.planning.control import Decisions
from wingbeat.planning.controllers import threshold_key
from wingbeat.planning.thresholds import ThresholdResult, cuts_from_thresholds, max_iterations
from wingbeat.transport import loopback
from wingbeat.types import TensorSpec

LEARNING = 2
"""Iterations until the order of the buckets is known."""

LAYERS = 5
"""Of `net`, the scalar among them."""

Found = dict[str, Any]


def geryon(**options: Any) -> Any:
    settings = {
        "mb": TINY_MB / 20,
        "threshold": "tuned",
        "steps": 1,
        "encrypted": False,
        "servers": 1,
    }
    return wingbeat.Geryon(**{**settings, **options})


def train(world: Any, strategy: Any, iterations: int, known: Decisions | None = None) -> Found:
    """Weights, and the thresholds in use in each iteration; 0 iterations: until it is decided."""
    model = net()
    model, optimizer = wingbeat.distribute(model, sgd(model.parameters()), strategy, world=world)
    own = engine(model)
    if known is not None:
        own.control.keep(known)
    used = []
    while len(used) < (iterations or 500) and (iterations or own.control.deciding()):
        optimizer.zero_grad()
        backward(model, world.rank, len(used))
        optimizer.step()
        used.append(own.runtime.exchange._planner.priorities.thresholds)
    model.synchronize()
    weights = [param.detach().clone() for param in model.parameters()]
    layers = len({name.rpartition(".")[0] for b in own.buckets for name in b.names})
    tuning, decisions = own.control.thresholds, own.control.decisions()
    wingbeat.release(model, optimizer)
    return {"weights": weights, "used": used, "layers": layers, "decisions": decisions,
            "result": tuning and tuning.result}  # fmt: skip


def on(strategy: Any, iterations: int = 0, known: Decisions | None = None) -> list[Found]:
    return loopback.run(loopback.worlds(2), lambda world: train(world, strategy, iterations, known))


@pytest.mark.parametrize(
    ("pull", "classes", "update"),
    [
        ("ready", 2, "worker"),
        ("start", 3, "worker"),
        ("start", 2, "worker"),
        ("ready", 4, "worker"),
        ("ready", 2, "server"),
        ("start", 3, "server"),
    ],
)
def test_threshold_tuning_workers_change_together_and_weights_match(
    pull: str, classes: int, update: str
) -> None:
    found = on(geryon(pull=pull, classes=classes, update=update))
    first, second = found
    assert first["used"] == second["used"]
    assert len(first["used"]) <= LEARNING + max_iterations(first["layers"], classes, 1)
    assert len(set(first["used"])) > 4
    assert first["used"][-1] == first["result"].thresholds == first["decisions"].thresholds
    assert first["decisions"] == second["decisions"]
    assert second["result"] is None
    assert first["result"].layers == first["layers"] > 4
    level = tuple(1 - (i + 1) / classes for i in range(classes - 1))
    given = level if classes > 2 else level[0]
    fixed = geryon(pull=pull, classes=classes, threshold=given, update="worker")
    same = on(fixed, len(first["used"]))
    for own in found:
        for got, want in zip(own["weights"], same[0]["weights"], strict=True):
            assert torch.equal(got, want)


def test_threshold_tuning_keeps_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    class Watch:
        """Says what an iteration takes by the thresholds in use: best with three layers."""

        def __init__(self, _device: torch.device) -> None:
            pass

        def lap(self) -> float:
            return 1 + 0.1 * abs(urgent["count"] - 3)

        def restart(self) -> None:
            pass

    urgent = {"count": 0}
    prioritise = ServerExchange.prioritise

    def noted(exchange: ServerExchange, levels: Any) -> None:
        urgent["count"] = sum(cuts_from_thresholds(levels, LAYERS))
        prioritise(exchange, levels)

    monkeypatch.setattr(ServerExchange, "prioritise", noted)
    monkeypatch.setattr("wingbeat.planning.control.IterationTimer", Watch)
    [own, _] = on(geryon())
    assert own["layers"] == LAYERS
    assert own["result"].chosen == (3,)
    assert own["result"].seconds((3,)) == 1


def test_threshold_tuning_result_is_kept_in_plan_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "urgent.json"
    [first, _] = on(geryon(plan_file=str(path)))
    known = files.load(path, ThresholdResult)
    assert known.record == first["result"]
    assert known.key["workers"] == 2
    with caplog.at_level(logging.INFO, logger="wingbeat"):
        again = on(geryon(plan_file=str(path)), 3)
    assert [own["used"] for own in again] == [[first["result"].thresholds] * 3] * 2
    assert f"from plan file {path}" in caplog.text
    with caplog.at_level(logging.WARNING, logger="wingbeat"):
        other = on(geryon(plan_file=str(path), mb=3 * TINY_MB))
    assert "is for another model, cluster or strategy: planning again" in caplog.text
    assert files.load(path, ThresholdResult).record == other[0]["result"] != first["result"]
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="wingbeat"):
        on(geryon(plan_file=str(path), mb=3 * TINY_MB, update="server"), 3)
    assert "is for another model, cluster or strategy: planning again" in caplog.text


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "bf16"}, {"compression": "bf16", "back": "dense"},
        {"compression": "sketch"}, {"encrypted": True}, {"order": "urgent"}, {"slice": 7},
        {"pushes": False},
        {"pull": "start"}, {"servers": 2}, {"placement": "whole"}, {"classes": 3}, {"mb": 1},
    ],
    ids=repr,
)  # fmt: skip
def test_threshold_key_differs_for_other_options(options: dict[str, Any]) -> None:
    world = SimpleNamespace(size=2, links=())
    specs = [TensorSpec("weight", (3,), "float32", 4)]

    def key(**given: Any) -> dict[str, Any]:
        around: Any = SimpleNamespace(specs=specs), SimpleNamespace(world=world)
        return threshold_key(*around, geryon(**given))

    assert key() == key(steps=7, plan_file="x.json")
    assert key() != key(**options)
    if "back" in options:
        assert key(**options) != key(**{**options, "back": "wire"})


def test_threshold_tuning_invalid_plan_file_is_refused_on_every_rank(tmp_path: Path) -> None:
    path = tmp_path / "urgent.json"
    path.write_text("{}")
    for file, named in ((path, "is not a plan file"), (tmp_path / "no" / "x.json", "no folder")):
        for world_error in errors(geryon(plan_file=str(file))):
            assert named in str(world_error)
            assert isinstance(world_error, UsageError)


def errors(strategy: Any) -> list[BaseException | None]:
    def attempt(world: Any) -> BaseException | None:
        try:
            train(world, strategy, 1)
        except (UsageError, PeerError) as error:
            return error
        finally:
            world.close()
        return None

    return loopback.run(loopback.worlds(2), attempt)


@pytest.mark.parametrize("answer", [7, [0.5, 0.2], [2.0], ["a"], [True], [], {}])
def test_threshold_tuning_malformed_thresholds_from_rank_0_are_refused(
    answer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wingbeat.planning.controllers.known_choice", lambda *_: answer)
    for error in errors(geryon(plan_file=str(tmp_path / "x.json"))):
        assert isinstance(error, PeerError)
        assert "malformed thresholds" in str(error)


def test_threshold_tuning_single_bucket_has_nothing_to_tune(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="wingbeat"):
        found = on(geryon(mb=1))
    assert [len(own["used"]) for own in found] == [3, 3]
    assert caplog.text.count("nothing to tune: 1 layer") == 1


def test_threshold_tuning_known_decision_is_used_at_once() -> None:
    known = Decisions(thresholds=(0.31,))
    found = on(geryon(), 4, known)
    assert [own["used"] for own in found] == [[(0.31,)] * 4] * 2
    assert [own["decisions"] for own in found] == [known] * 2
    assert known.to_json() == {"thresholds": [0.31]}


def test_threshold_tuning_follows_bucket_tuning() -> None:
    plan = wingbeat.parts.TunedBuckets(
        search="grid", mb=TINY_MB / 2, min_mb=TINY_MB / 8, max_mb=TINY_MB, trials=2, steps=1,
        first_mb=0, last_mb=0,
    )  # fmt: skip
    exchange = wingbeat.parts.Servers(count=1, threshold="tuned", steps=1, encrypted=False)
    strategy = wingbeat.Strategy(plan=plan, exchange=exchange, schedule="served")
    first, second = on(strategy)
    assert first["decisions"] == second["decisions"]
    assert first["decisions"].bucket_bytes
    assert first["decisions"].thresholds == first["used"][-1]
    assert first["result"].layers == first["layers"] > 1
    sized = next(i for i, used in enumerate(first["used"]) if used != (0.5,))
    assert sized >= 2 * 4


def test_coarse_threshold_divides_by_kind_or_warns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="wingbeat"):
        found = on(geryon(threshold="coarse"), 3)
        served = on(geryon(threshold="coarse", update="server"), 3)
    assert [own["used"] for own in [*found, *served]] == [[()] * 3] * 4
    for got, want in zip(served[0]["weights"], found[0]["weights"], strict=True):
        assert torch.equal(got, want)
    assert not caplog.text, "a scalar parameter stands beside linear layers"
    with caplog.at_level(logging.WARNING, logger="wingbeat"):
        on(geryon(threshold="coarse", mb=1), 3)
    assert caplog.text.count("has only fully connected layers") == 1
    assert "none has only" in caplog.text
