"""Plans tried in whole iterations while training goes on: all alike, and nothing is lost."""

from __future__ import annotations

import functools
import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import wingbeat
from helpers.training import assert_same, backward, engine, net, sgd, weights
from wingbeat.errors import PeerError, UsageError
from wingbeat.planning import control, measure, trials
from wingbeat.planning.measure import Samples
from wingbeat.transport import loopback

STEPS = 1
PLANNED = 2 * (trials.DRIFT_WARMUP + STEPS + 1)
TRIAL = 40
"""Iterations within which a trial of at most four plans is over, as `_short` has it."""

FREE = Samples(
    encode=tuple((float(n), 0.0) for n in (1000, 2000, 4000)),
    exchange=tuple((float(n), 1e-3 * n) for n in (1000, 2000, 4000)),
    cpu=tuple((float(n), 1e-6 * n) for n in (1000, 2000, 4000)),
)
"""Nothing but bytes counts: the more buckets, the sooner the first begins."""

_here = threading.local()


class Laps:
    """An iteration takes what a test makes up, by how many buckets it had."""

    of: Callable[[int], float] = staticmethod(lambda _buckets: 1.0)

    def __init__(self, _device: Any) -> None:
        _here.buckets = 0

    def lap(self) -> float:
        return type(self).of(_here.buckets) if _here.buckets else 0.0

    def restart(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    few = functools.partial(measure.measure_links, largest_bytes=4096, repeats=1)
    monkeypatch.setattr(measure, "measure_links", few)
    monkeypatch.setattr(measure, "measure_wire", lambda *_a, **_k: FREE)
    monkeypatch.setattr(trials, "PLAN_ITERATIONS", 2)
    monkeypatch.setattr(trials, "PLAN_WARMUP", 1)
    monkeypatch.setattr(trials, "PLAN_MARGINS", (0.1, 0.05))
    monkeypatch.setattr(control, "IterationTimer", Laps)


def laps(monkeypatch: pytest.MonkeyPatch, of: Callable[[int], float]) -> None:
    monkeypatch.setattr(Laps, "of", staticmethod(of))


def one_is_best(buckets: int) -> float:
    return 1.0 if buckets == 1 else 2.0


def many_are_best(buckets: int) -> float:
    return 3.0 if buckets == 1 else 2.0 / buckets


def omgs(**options: Any) -> wingbeat.Strategy:
    return wingbeat.OMGS(**{"density": 0.1, "warmup": 0, "steps": STEPS, **options})


class Run:
    """One worker's training: the buckets of each iteration, and what came of it."""

    def __init__(
        self,
        world: Any,
        strategy: Any,
        iterations: int = PLANNED + TRIAL,
        lr: float | None = None,
        body: Any = backward,
    ) -> None:
        model = net()
        optimizer = sgd(model.parameters())
        if lr is not None:
            optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        model, optimizer = wingbeat.distribute(model, optimizer, strategy, world=world)
        self.buckets: list[int] = []
        self.deciding: list[bool] = []
        self.sent = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        for step in range(iterations):
            optimizer.zero_grad()
            body(model, world.rank, step)
            _here.buckets = len(engine(model).buckets)
            self.buckets.append(_here.buckets)
            self.deciding.append(engine(model).control.deciding())
            if lr == 0:
                for name, p in model.named_parameters():
                    self.sent[name] += 0 if p.grad is None else p.grad
            optimizer.step()
        self.residuals = optimizer.residual_state_dict()["residuals"] if lr == 0 else {}
        self.weights = weights(model)
        self.report = engine(model).merging.report()
        self.decisions = engine(model).control.decisions()


def on(size: int, *args: Any, **options: Any) -> list[Run]:
    return loopback.run(loopback.worlds(size), lambda world: Run(world, *args, **options))


@pytest.mark.parametrize("of", [one_is_best, many_are_best])
@pytest.mark.parametrize("size", [2, 4])
def test_merging_trial_keeps_fastest_plan_on_all_workers(
    size: int, of: Callable[[int], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    laps(monkeypatch, of)
    found = on(size, omgs())
    assert all(run.buckets == found[0].buckets for run in found)
    assert len(set(found[0].buckets[PLANNED:])) > 1, "several were tried"
    report = found[0].report
    tried = [each["iteration_s"] for each in report["tried"]]
    assert tried == sorted(tried)
    assert tried[0] == of(report["buckets"]) == report["measured_s"]
    assert min(map(of, set(found[0].buckets))) == tried[0]
    assert found[0].buckets[-1] == report["buckets"]
    assert report["rules"] == report["tried"][0]["rules"] == list(found[0].decisions.rules)
    assert not found[0].deciding[-1]
    assert found[0].deciding[PLANNED]


def test_merging_trial_iterations_with_previous_plan_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trials, "PLAN_WARMUP", 0)
    monkeypatch.setattr(trials, "PLAN_ITERATIONS", 1)
    laps(monkeypatch, many_are_best)
    for each in on(2, omgs())[0].report["tried"]:
        assert each["iteration_s"] == many_are_best(each["buckets"])


@pytest.mark.parametrize("merge", ["exact", "paper", "printed", "wfbp"])
def test_merging_trial_named_rule_is_not_tried(merge: str, monkeypatch: pytest.MonkeyPatch) -> None:
    laps(monkeypatch, one_is_best)
    for run in on(2, omgs(merge=merge)):
        assert len(set(run.buckets[PLANNED:])) == 1
        assert not any(run.deciding[PLANNED:])
        assert run.report["tried"] == []
        assert run.report["rules"] == [merge]
        assert run.decisions.rules is None


def test_merging_trial_residuals_stay_with_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    laps(monkeypatch, many_are_best)
    iterations, size = PLANNED + TRIAL, 2
    found = on(size, omgs(density=0.02), iterations, lr=0.0)
    changes = sum(a != b for a, b in zip(found[0].buckets, found[0].buckets[1:], strict=False))
    assert changes >= 3
    pulled: dict[str, torch.Tensor] = {}
    for step in range(iterations):
        for rank in range(size):
            model = net()
            backward(model, rank, step)
            for name, p in model.named_parameters():
                grad = torch.zeros_like(p) if p.grad is None else p.grad
                pulled[name] = pulled.get(name, torch.zeros_like(p)) + grad / size
    for name, sent in found[0].sent.items():
        still = sum(run.residuals[name] for run in found)
        torch.testing.assert_close(sent + still, pulled[name], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "strategy",
    [
        omgs(compression="fp32", density=wingbeat.TopK.density, warmup=wingbeat.TopK.warmup),
        wingbeat.DeAR(plan="merged", steps=STEPS),
        wingbeat.DeAR(plan="merged", steps=STEPS, shard_optimizer=True),
        wingbeat.Strategy(plan=wingbeat.parts.Merged(steps=STEPS), exchange="mesh"),
        omgs(density=1.0),
        wingbeat.OMGS(
            compression=wingbeat.TopK(
                density=1.0, warmup=0, groups={"head.*": 1.0}, auto_disable=False
            ),
            steps=STEPS,
        ),
    ],
    ids=str,
)
def test_merging_trial_weights_match_ddp(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    laps(monkeypatch, many_are_best)
    found = on(2, strategy)
    assert len(set(found[0].buckets[PLANNED:])) > 1
    expected = loopback.run(loopback.worlds(2), lambda world: _dense(world))[0]
    for run in found:
        assert_same(run.weights, found[0].weights, tolerance=0.0)
        assert_same(run.weights, expected, tolerance=1e-4)


def _dense(world: Any) -> dict[str, torch.Tensor]:
    model = net()
    model, optimizer = wingbeat.distribute(
        model, sgd(model.parameters()), wingbeat.AllReduce(), world=world
    )
    for step in range(PLANNED + TRIAL):
        optimizer.zero_grad()
        backward(model, world.rank, step)
        optimizer.step()
    return weights(model)


@pytest.mark.parametrize(
    "wire",
    [
        wingbeat.Sketch(auto_disable=False),
        wingbeat.LowRank(rank=1, auto_disable=False),
        "bf16",
        wingbeat.parts.Half(),
        wingbeat.TopK(auto_disable=False, density=0.1, warmup=0, momentum=0.5),
    ],
    ids=str,
)
@pytest.mark.parametrize("schedule", ["wfbp", "dear"])
def test_merging_trial_workers_stay_equal_for_any_wire(
    wire: Any, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if schedule == "dear" and getattr(wire, "momentum", 0):
        pytest.skip("momentum correction needs whole buckets")
    laps(monkeypatch, one_is_best)
    plan = wingbeat.parts.Merged(steps=STEPS)
    strategy = wingbeat.Strategy(plan=plan, compression=wire, schedule=schedule)
    plain = getattr(wire, "momentum", 0)
    found = on(2, strategy, lr=0.01 if plain else None)
    assert len(set(found[0].buckets[PLANNED:])) > 1
    assert found[0].report["buckets"] == 1
    assert_same(found[1].weights, found[0].weights, tolerance=0.0)


def test_merging_trial_waits_for_final_density(monkeypatch: pytest.MonkeyPatch) -> None:
    laps(monkeypatch, one_is_best)
    warmup = PLANNED + 15
    found = on(2, omgs(warmup=warmup), PLANNED + 15 + TRIAL)
    assert len(set(found[0].buckets[PLANNED : warmup + 1])) == 1
    assert all(found[0].deciding[: warmup + 1])
    assert len(found[0].report["tried"]) > 1
    assert found[0].buckets[-1] == 1


def test_merging_trial_plan_file_keeps_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    laps(monkeypatch, one_is_best)
    file = tmp_path / "merged.json"
    first = on(2, omgs(plan_file=str(file)))
    assert first[0].buckets[-1] == 1
    known = json.loads(file.read_text())
    assert known["timings"][0]["stops"] == [first[0].report["tensors"]]
    laps(monkeypatch, many_are_best)
    second = on(2, omgs(plan_file=str(file)), 4)
    assert second[0].buckets == [1] * 4
    assert not any(second[0].deciding)
    assert second[0].report["tried"] == first[0].report["tried"]
    # Who names a rule plans by it, from what was measured.
    exact = on(2, omgs(plan_file=str(file), merge="exact"), 4)
    assert set(exact[0].buckets) == {first[0].buckets[PLANNED]}
    assert exact[0].report["tried"] == []
    assert json.loads(file.read_text()) == known


def test_merging_trial_plan_file_without_trial_skips_measuring_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    laps(monkeypatch, one_is_best)
    file = tmp_path / "merged.json"
    on(2, omgs(plan_file=str(file), merge="exact"), PLANNED + 2)
    before = json.loads(file.read_text())
    assert before["timings"] == []
    # As an earlier version has left it.
    for key in ("timings", "contention", "cpu"):
        del before[key]
    file.write_text(json.dumps(before))
    found = on(2, omgs(plan_file=str(file)), TRIAL)
    assert found[0].deciding[0]
    assert found[0].buckets[-1] == 1
    assert len(json.loads(file.read_text())["timings"]) > 1


@pytest.mark.parametrize(
    "change",
    [
        [{"rules": ["one"], "stops": [1], "iteration_s": 1.0}],
        [{"rules": ["one"], "stops": [], "iteration_s": 1.0}],
        [{"rules": "one", "stops": [6], "iteration_s": 1.0}],
        [{"rules": ["one"], "stops": [6], "iteration_s": -1.0}],
        {"rules": ["one"]},
        [3],
    ],
)
def test_merging_trial_damaged_choice_is_refused(tmp_path: Path, change: Any) -> None:
    file = tmp_path / "merged.json"
    on(2, omgs(plan_file=str(file), merge="exact"), PLANNED + 2)
    file.write_text(json.dumps({**json.loads(file.read_text()), "timings": change}))
    with pytest.raises(UsageError, match=r"merged\.json.*delete the file"):
        on(2, omgs(plan_file=str(file)), 2)


def test_merging_trial_decisions_keep_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    laps(monkeypatch, one_is_best)
    first = on(2, omgs())
    known = [run.decisions for run in first]
    assert known[0].to_json()["buckets"] == 1
    assert "one" in known[0].to_json()["rules"]
    assert known[0].to_json() == known[1].to_json()
    laps(monkeypatch, many_are_best)

    def again(world: Any) -> tuple[list[int], bool]:
        model = net()
        model, optimizer = wingbeat.distribute(model, sgd(model.parameters()), omgs(), world=world)
        own = engine(model).control
        own.keep(known[world.rank])
        buckets = []
        for step in range(3):
            optimizer.zero_grad()
            backward(model, world.rank, step)
            optimizer.step()
            buckets.append(len(engine(model).buckets))
        return buckets, own.deciding()

    assert loopback.run(loopback.worlds(2), again) == [([1, 1, 1], False)] * 2


def test_merging_trial_drift_restarts_everything(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trials, "DRIFT_WINDOW", 3)
    slower = {"factor": 1.0}
    laps(monkeypatch, lambda buckets: slower["factor"] * many_are_best(buckets))

    def body(model: Any, rank: int, step: int) -> None:
        if step == PLANNED + TRIAL + 15:
            slower["factor"] = 10.0
        backward(model, rank, step)

    with caplog.at_level(logging.INFO, logger="wingbeat"):
        found = on(2, omgs(), 2 * (PLANNED + TRIAL) + 40, body=body)
    assert all(run.buckets == found[0].buckets for run in found)
    assert "measuring again" in caplog.text
    assert caplog.text.count("plans tried in whole iterations") == 2
    settled = found[0].deciding.index(False)
    again = found[0].deciding.index(True, settled)
    assert found[0].buckets[again + 1] == 1, "backward is measured without exchanges beside it"
    assert not found[0].deciding[-1]


def test_merging_trial_wrong_prediction_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trials, "DRIFT_WINDOW", 3)
    laps(monkeypatch, one_is_best)
    with caplog.at_level(logging.INFO, logger="wingbeat"):
        found = on(2, omgs(), PLANNED + TRIAL + 20)
    assert caplog.text.count("were predicted at") == 1
    report = found[0].report
    assert report["prediction_error"] == pytest.approx(report["predicted_s"] - 1.0)
    assert abs(report["prediction_error"]) > 0.1
    caplog.clear()

    def slower(model: Any, rank: int, step: int) -> None:
        if step == PLANNED + 1:  # than when it was planned
            laps(monkeypatch, lambda _buckets: 4.0)
        backward(model, rank, step)

    with caplog.at_level(logging.INFO, logger="wingbeat"):
        on(2, omgs(merge="exact"), PLANNED + 20, body=slower)
    assert caplog.text.count("were predicted at") == 1


def test_merging_trial_workers_with_different_batch_counts_agree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One runs out of batches in the midst of a trial; the others go on, and end it."""
    laps(monkeypatch, one_is_best)

    def body(world: Any) -> tuple[dict[str, torch.Tensor], int]:
        model = net()
        model, optimizer = wingbeat.distribute(model, sgd(model.parameters()), omgs(), world=world)
        with model.join():
            for step in range(PLANNED + (5 if world.rank == 1 else TRIAL)):
                optimizer.zero_grad()
                backward(model, world.rank, step)
                _here.buckets = len(engine(model).buckets)
                optimizer.step()
        return weights(model), len(engine(model).buckets)

    found = loopback.run(loopback.worlds(3), body)
    for weight, buckets in found:
        assert_same(weight, found[0][0], tolerance=0.0)
        assert buckets == 1


def test_merging_trial_lost_worker_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    laps(monkeypatch, many_are_best)

    def body(world: Any) -> str:
        if world.rank == 1:
            Run(world, omgs(), PLANNED + 4)
            world.close()
            return ""
        with pytest.raises(PeerError, match="rank 1") as caught:
            Run(world, omgs())
        return str(caught.value)

    assert "rank 1" in loopback.run(loopback.worlds(2, timeout=1.0), body)[0]


@pytest.mark.parametrize("accumulate", ["plain", "no_sync"])
def test_merging_trial_gradients_may_be_accumulated(
    accumulate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    laps(monkeypatch, one_is_best)

    def body(model: Any, rank: int, step: int) -> None:
        if accumulate == "no_sync":
            with model.no_sync():
                backward(model, rank, 2 * step)
        else:
            backward(model, rank, 2 * step)
        backward(model, rank, 2 * step + 1)

    found = on(2, omgs(), PLANNED + TRIAL, body=body)
    assert_same(found[1].weights, found[0].weights, tolerance=0.0)
    assert found[0].buckets[-1] == 1


def test_merging_trial_interrupted_backward_keeps_workers_in_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    laps(monkeypatch, one_is_best)

    class Cut(Exception):
        pass

    def fails(_grad: torch.Tensor) -> None:
        raise Cut

    def body(model: Any, rank: int, step: int) -> None:
        if step == PLANNED + 4 and rank == 0:
            hook = next(model.parameters()).register_hook(fails)
            with pytest.raises(Cut):
                backward(model, rank, step)
            hook.remove()
        else:
            backward(model, rank, step)

    found = on(2, omgs(), PLANNED + TRIAL + 4, body=body)
    assert found[0].buckets[-1] == found[1].buckets[-1] == 1


@pytest.mark.parametrize("merge", ["tried", "exact"])
def test_merging_trial_effort_is_counted_and_logged(
    merge: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    laps(monkeypatch, one_is_best)
    with caplog.at_level(logging.INFO, logger="wingbeat"):
        found = on(2, omgs(merge=merge))
    for run in found:
        effort = run.report["deciding"]
        assert effort["iterations"] == run.deciding.index(False)
        assert 0 < effort["paused_s"] < effort["seconds"]
    effort = found[0].report["deciding"]
    assert caplog.text.count("layers are merged as decided after") == 1
    assert (
        f"after {effort['iterations']} iterations in {effort['seconds']:.3g} s, of which training "
        f"paused {effort['paused_s']:.3g} s for measurements"
    ) in caplog.text


def test_merging_trial_effort_after_drift_counts_from_drift(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trials, "DRIFT_WINDOW", 3)
    factor = [1.0]
    laps(monkeypatch, lambda buckets: factor[0] * one_is_best(buckets))

    def body(model: Any, rank: int, step: int) -> None:
        factor[0] = 10.0 if step >= PLANNED + TRIAL else 1.0
        backward(model, rank, step)

    with caplog.at_level(logging.INFO, logger="wingbeat"):
        found = on(2, omgs(), 2 * (PLANNED + TRIAL), body=body)
    assert caplog.text.count("layers are merged as decided after") == 2
    deciding = found[0].deciding
    again = deciding.index(True, deciding.index(False))
    assert found[0].report["deciding"]["iterations"] == deciding.index(False, again) - again
