"""Layers merged while training goes on: all workers alike, and nothing but the buckets changes."""

from __future__ import annotations

import functools
import json
import logging
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import wingbeat
import wingbeat_lab
from helpers.columns import columns
from helpers.merges import work
from helpers.training import assert_same, backward, engine, net, sgd, weights
from wingbeat.compression import Sketch, TopK
from wingbeat.errors import PeerError, UsageError
from wingbeat.planning import control, measure, merge, merging, trials
from wingbeat.planning.backward import BackwardProfiler
from wingbeat.planning.measure import SECOND_PHASE, Samples
from wingbeat.planning.merging import CostProbe, LayerMerging
from wingbeat.strategies import MGWFBP
from wingbeat.transport import loopback
from wingbeat.types import Plan, PlannedBucket, Span

STEPS = 2
FIRST = trials.DRIFT_WARMUP + STEPS + 1
"""Backward passes, the last of which is the first with a plan."""

PLANNED = 2 * FIRST
"""The same for the plan that stays."""

SLOW_LINKS = Samples(
    encode=tuple((float(n), 1e-9 * n) for n in (1000, 2000, 4000)),
    exchange=tuple((float(n), 10.0 + 1e-9 * n) for n in (1000, 2000, 4000)),
)
"""Every exchange takes ten seconds: whatever backward takes, one is best."""

FREE = Samples(
    encode=tuple((float(n), 0.0) for n in (1000, 2000, 4000)),
    exchange=tuple((float(n), 1e-3 * n) for n in (1000, 2000, 4000)),
)
"""Nothing but bytes counts, and they dearly: the more buckets, the sooner the first begins."""


WORKLOAD = work([0.0, 0.1, 0.2], [1, 1, 1])


@pytest.fixture(autouse=True)
def _few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain collectives are measured to be shown; a few will do."""
    few = functools.partial(measure.measure_links, largest_bytes=4096, repeats=1)
    monkeypatch.setattr(measure, "measure_links", few)


@pytest.fixture
def _measured(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Have the links cost what the test says; everything else is measured."""
    monkeypatch.setattr(measure, "measure_wire", lambda *_a, **_k: request.param)


def _train(
    world: Any,
    strategy: Any,
    iterations: int = PLANNED + 2,
    accumulate: int = 1,
    body: Any = backward,
) -> tuple[list[torch.Tensor], list[list[int]], Any]:
    """Weights, the buckets' sizes in each iteration, and the engine's report."""
    model = net()
    model, optimizer = wingbeat.distribute(model, sgd(model.parameters()), strategy, world=world)
    sizes = []
    for step in range(iterations):
        optimizer.zero_grad()
        for part in range(accumulate):
            body(model, world.rank, 10 * step + part)
        optimizer.step()
        sizes.append([len(bucket.slots) for bucket in engine(model).buckets])
    own = engine(model).merging
    return weights(model), sizes, own.report() if own is not None else None


def _on(size: int, *args: Any, **options: Any) -> list[Any]:
    return loopback.run(loopback.worlds(size), lambda world: _train(world, *args, **options))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("rule", ["exact", "paper", "printed", "wfbp"])
def test_merging_workers_plan_together_and_weights_match(rule: str, accumulate: int) -> None:
    strategy = wingbeat.OMGS(compression="fp32", merge=rule, steps=STEPS)
    iterations = PLANNED * accumulate + 2
    results = _on(3, strategy, iterations, accumulate)
    assert all(report["merge"] == rule for _, _, report in results)
    assert all(sizes == results[0][1] for _, sizes, _ in results)
    expected = _on(3, wingbeat.AllReduce(mb=0.0004), iterations, accumulate)[0][0]
    for found, _, _ in results:
        assert_same(found, results[0][0], tolerance=0.0)
        assert_same(found, expected, tolerance=1e-5)


@pytest.mark.parametrize(
    "wire",
    ["fp32", wingbeat.Sketch(auto_disable=False), wingbeat.TopK(auto_disable=False)],
    ids=str,
)
@pytest.mark.parametrize("update", ["", "sharded"])
def test_merging_dear_measures_reduce_scatters(wire: Any, update: str) -> None:
    strategy = wingbeat.Strategy(
        plan=wingbeat.parts.Merged(steps=STEPS), schedule="dear", compression=wire, update=update
    )
    results = _on(3, strategy)
    assert all(report["gather"] is not None for *_, report in results)
    assert all(sizes == results[0][1] for _, sizes, _ in results)
    for found, _, _ in results:
        assert_same(found, results[0][0], tolerance=0.0)
    if wire == "fp32":
        expected = _on(3, wingbeat.AllReduce(mb=0.0004))[0][0]
        assert_same(results[0][0], expected, tolerance=1e-5)


@pytest.mark.parametrize(("gather", "several"), [(FREE, True), (SLOW_LINKS, False)])
def test_merging_dear_prices_both_phases(
    gather: Samples, several: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reduce-scatters alone ask for many buckets; each costs all-gathers that start slowly more."""

    def measured(
        _collectives: Any, _wire: Any, collective: str, *_: Any, **_options: Any
    ) -> Samples:
        return gather if collective == SECOND_PHASE else FREE

    monkeypatch.setattr(measure, "measure_wire", measured)
    results = _on(2, wingbeat.DeAR(plan="merged@exact"), 2 * (trials.DRIFT_WARMUP + 10 + 1) + 2)
    for _, sizes, report in results:
        assert (len(sizes[-1]) > 1) is several
        assert report["predicted_s"] > (0 if several else 10)


@pytest.mark.parametrize(
    ("strategy", "way"),
    [
        (wingbeat.DeAR(plan="merged", steps=STEPS), "reduce-scatter"),
        (
            wingbeat.DeAR(plan="merged", steps=STEPS, compression=wingbeat.TopK(density=0.1)),
            "reduce-scatter",
        ),
        (wingbeat.OMGS(steps=STEPS), "payload all-gather"),
        (MGWFBP(steps=STEPS), "all-reduce"),
    ],
    ids=str,
)
def test_merging_measures_collective_that_competes_with_backward(strategy: Any, way: str) -> None:
    def body(world: Any) -> tuple[str, str]:
        model = net()
        model, _ = wingbeat.distribute(model, sgd(model.parameters()), strategy, world=world)
        plans = engine(model).control.merging._costs
        return plans.collective, plans.key()["collective"]

    assert loopback.run(loopback.worlds(2), body) == [(way, way)] * 2


def test_merging_dear_exchange_ends_with_last_reduce_scatter() -> None:
    """Nobody waits for it in backward."""

    class Late:
        def __init__(self) -> None:
            self.callbacks: list[Any] = []

        def add_done_callback(self, callback: Any) -> None:
            self.callbacks.append(callback)

    def ends(strategy: Any) -> list[int]:
        def body(world: Any) -> list[int]:
            model = net()
            model, _ = wingbeat.distribute(model, sgd(model.parameters()), strategy, world=world)
            passes, late, found = engine(model).passes, Late(), []
            passes.begin()
            passes.launched(late)
            passes.waited()
            found.append(len(passes.ends))
            for callback in late.callbacks:
                callback(late)
            return [*found, len(passes.ends)]

        first, second = loopback.run(loopback.worlds(2), body)
        assert first == second
        return first

    assert ends(wingbeat.DeAR(plan="merged", steps=STEPS)) == [0, 1]
    assert ends(MGWFBP(steps=STEPS)) == [1, 1]


def test_merging_measures_dtype_of_most_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def measured(*_args: Any, dtype: torch.dtype, **_options: Any) -> Samples:
        asked.append(dtype)
        return FREE

    usual = net

    def mixed() -> Any:
        model = usual()
        model.scale = torch.nn.Parameter(model.scale.detach().double())
        assert next(model.parameters()).dtype == torch.float64
        return model

    monkeypatch.setattr(measure, "measure_wire", measured)
    monkeypatch.setitem(globals(), "net", mixed)
    _on(2, wingbeat.OMGS(compression="fp32", steps=STEPS), FIRST)
    assert asked == [torch.float32] * 2


@pytest.mark.parametrize(
    ("_measured", "most"), [(SLOW_LINKS, 1), (FREE, 10)], indirect=["_measured"]
)
@pytest.mark.usefixtures("_measured")
def test_merging_plan_follows_cost_of_links(most: int) -> None:
    for _, sizes, report in _on(2, wingbeat.OMGS(density=0.5, steps=STEPS)):
        assert {len(row) for row in sizes[: FIRST - 1]} == {1}
        assert {len(row) for row in sizes[PLANNED - 1 :]} == {report["buckets"]}
        assert report["buckets"] == 1 if most == 1 else report["buckets"] > 1
        assert report["tensors"] == sum(sizes[-1])


@pytest.mark.parametrize(
    "strategy",
    [
        wingbeat.OMGS(density=1.0, steps=STEPS),
        wingbeat_lab.TopKSGD(density=1.0),
        wingbeat_lab.LAGS(density=1.0),
        wingbeat_lab.MGS(density=1.0, elements=50),
        wingbeat_lab.PSGD(),
        MGWFBP(steps=STEPS),
    ],
    ids=lambda strategy: repr(strategy).partition("(")[0],
)
def test_merging_table_one_with_full_density_equals_ddp(strategy: Any) -> None:
    expected = _on(2, wingbeat.AllReduce())[0][0]
    for found, _, _ in _on(2, strategy):
        assert_same(found, expected, tolerance=1e-5)


def test_merging_table_one_has_expected_buckets() -> None:
    tensors = len(list(net().parameters()))
    counts = {
        repr(strategy).partition("(")[0]: _on(2, strategy, 2)[0][1][-1]
        for strategy in (
            wingbeat_lab.TopKSGD(),
            wingbeat_lab.LAGS(),
            wingbeat_lab.MGS(elements=50),
            wingbeat_lab.PSGD(),
        )
    }
    assert counts["TopKSGD"] == [tensors]
    assert counts["LAGS"] == counts["PSGD"] == [1] * tensors
    assert 1 < len(counts["MGS"]) < tensors


@pytest.mark.parametrize("_measured", [FREE], indirect=True)
@pytest.mark.usefixtures("_measured")
def test_merging_residuals_stay_with_parameters() -> None:
    """Until the plan there is one bucket; afterwards others, with residuals from before."""

    steps = PLANNED + 3

    def kept(world: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[int]]:
        model = net()
        # Nothing moves: what was pulled and has not travelled is in the residuals.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        strategy = wingbeat.OMGS(density=0.02, warmup=0, steps=STEPS)
        model, optimizer = wingbeat.distribute(model, optimizer, strategy, world=world)
        sent = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        buckets = []
        for step in range(steps):
            optimizer.zero_grad()
            backward(model, world.rank, step)
            buckets.append(len(engine(model).buckets))
            for name, p in model.named_parameters():
                sent[name] += 0 if p.grad is None else p.grad
        return sent, optimizer.residual_state_dict()["residuals"], buckets

    results = loopback.run(loopback.worlds(2), kept)
    assert results[0][2][-1] > results[0][2][0] == 1
    pulled = _pulled(steps, 2)
    for name, sent in results[0][0].items():
        still = sum(residuals[name] for _, residuals, _ in results)
        torch.testing.assert_close(sent + still, pulled[name], atol=1e-5, rtol=1e-4)


def _pulled(steps: int, size: int) -> dict[str, torch.Tensor]:
    """What all workers' gradients come to without any codec, their mean in each step."""
    total: dict[str, torch.Tensor] = {}
    for step in range(steps):
        for rank in range(size):
            model = net()
            backward(model, rank, step)
            for name, p in model.named_parameters():
                grad = torch.zeros_like(p) if p.grad is None else p.grad
                total[name] = total.get(name, torch.zeros_like(p)) + grad / size
    return total


def test_merging_any_codec_works() -> None:
    strategy = wingbeat.OMGS(compression=Sketch(auto_disable=False), steps=STEPS)
    results = _on(2, strategy, PLANNED + 4)
    assert_same(results[0][0], results[1][0], tolerance=0.0)
    assert results[0][2] is not None
    dense = _on(2, wingbeat.AllReduce(), PLANNED + 4)[0][0]
    assert_same(results[0][0], dense, tolerance=0.05)


def test_merging_profile_before_plan_does_not_count_under_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted: list[tuple[int, int]] = []
    own = BackwardProfiler.summary

    def seen(self: BackwardProfiler, order: Any, iteration_s: float) -> Any:
        counted.append((len(self.totals()), len(self.ends)))
        return own(self, order, iteration_s)

    monkeypatch.setattr(BackwardProfiler, "summary", seen)
    _on(2, wingbeat.OMGS(density=0.1, warmup=0, steps=STEPS))
    assert counted == 2 * [(FIRST - 1, FIRST - 1)] + 2 * [(FIRST, FIRST)]


def test_merging_drift_restarts_measuring(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trials, "DRIFT_WINDOW", 3)
    made: list[int] = []
    plan = LayerMerging._measure_and_plan

    def counted(self: LayerMerging) -> None:
        made.append(self._world.rank)
        plan(self)

    monkeypatch.setattr(LayerMerging, "_measure_and_plan", counted)

    class Laps:
        """An iteration takes what the test says: ten times as long from the twentieth on."""

        def __init__(self, _device: Any) -> None:
            self.count = 0

        def lap(self) -> float:
            self.count += 1
            return 1.0 if self.count > 20 else 0.1

        def restart(self) -> None:
            pass

    monkeypatch.setattr(control, "IterationTimer", Laps)
    with caplog.at_level(logging.INFO, logger="wingbeat"):
        _on(2, wingbeat.OMGS(density=0.1, warmup=0, steps=STEPS), 50)
    assert sorted(made) == 4 * [0] + 4 * [1]
    assert "iterations take 1 s in place of 0.1 s" in caplog.text


def test_merging_plan_file_skips_measuring(tmp_path: Path) -> None:
    file = tmp_path / "merged.json"
    strategy = wingbeat.OMGS(density=0.1, warmup=0, steps=STEPS, plan_file=str(file))
    first = _on(2, strategy)
    known = json.loads(file.read_text())
    assert known["key"]["workers"] == 2
    second = _on(2, strategy, 3)
    for (_, before, _), (_, after, report) in zip(first, second, strict=True):
        assert after[0] == before[-1], "the first iteration has the plan already"
        assert report["buckets"] == len(before[-1])
    _on(3, strategy)
    assert json.loads(file.read_text())["key"]["workers"] == 3


@pytest.mark.parametrize("name", ["", "merged.json"])
def test_merging_plain_links_are_measured_for_a_plan_file_only(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No plan depends on them, and training pauses meanwhile."""
    measured: list[int] = []
    usual = measure.measure_links

    def counted(collectives: Any, **options: Any) -> Any:
        measured.append(collectives.world.rank)
        return usual(collectives, **options)

    monkeypatch.setattr(measure, "measure_links", counted)
    file = str(tmp_path / name) if name else ""
    _on(2, wingbeat.OMGS(density=0.1, warmup=0, steps=STEPS, plan_file=file))
    assert sorted(measured) == ([0, 1] if name else [])
    if name:
        links = json.loads((tmp_path / name).read_text())["interfaces"]
        assert [link["name"] for link in links] != []


def test_merging_damaged_plan_file_is_refused_on_every_rank(tmp_path: Path) -> None:
    file = tmp_path / "merged.json"
    file.write_text("{}")
    strategy = wingbeat.OMGS(steps=STEPS, plan_file=str(file))
    for rank in range(2):
        with pytest.raises(UsageError, match=r"merged\.json"):
            loopback.run(loopback.worlds(2), lambda world: _train(world, strategy))[rank]


def test_merging_missing_folder_is_named(tmp_path: Path) -> None:
    strategy = wingbeat.OMGS(plan_file=str(tmp_path / "none" / "plan.json"))
    with pytest.raises(UsageError, match="there is no folder"):
        _on(2, strategy)


@pytest.mark.parametrize("answer", [None, [[0], []], [[0, 1]], [1, 4], "x", [1, 3, 2], [1.0, 3]])
def test_checked_plans_malformed_plan_names_the_first_rank_of_the_column(answer: Any) -> None:
    with pytest.raises(PeerError, match="rank 3: rank 1 sent a malformed plan"):
        merging.checked_plans(answer and [[["exact"], answer]], WORKLOAD, columns(2, 2)[3])


def test_checked_plans_valid_plans_are_returned() -> None:
    sent = [[["exact"], [2, 3]], [["paper", "one"], [3]]]
    assert merging.checked_plans(sent, WORKLOAD, columns(2, 2)[3]) == [
        merge.Candidate(("exact",), Plan((PlannedBucket((0, 1)), PlannedBucket((2,))))),
        merge.Candidate(("paper", "one"), Plan((PlannedBucket((0, 1, 2)),))),
    ]


def test_merging_group_densities_travel_in_one_bucket() -> None:
    def kept(world: Any) -> dict[str, int]:
        groups = {"head.*": 1.0, "first.weight": 0.25}
        wire = wingbeat.TopK(density=0.01, warmup=0, groups=groups, auto_disable=False)
        strategy = wingbeat_lab.TopKSGD(compression=wire)
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model, optimizer = wingbeat.distribute(model, optimizer, strategy, world=world)
        backward(model, 0, 0)
        return {
            n: int((p.grad != 0).sum()) for n, p in model.named_parameters() if p.grad is not None
        }

    found = loopback.run(loopback.worlds(2), kept)[0]
    # Both workers have the same gradients here, so the same values are the largest.
    assert (found["head.weight"], found["head.bias"]) == (21, 3)
    assert found["first.weight"] == round(0.25 * 78)
    rest = [n for n in found if not n.startswith("head") and n != "first.weight"]
    assert sum(found[name] for name in rest) <= len(rest)


def test_merging_plan_file_of_other_wire_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "merged.json"
    strategy = wingbeat.OMGS(density=0.1, warmup=0, steps=STEPS, plan_file=str(file))
    _on(2, strategy)
    known = json.loads(file.read_text())
    rows = known["gradients"]
    rows[0]["name"], rows[1]["name"] = rows[1]["name"], rows[0]["name"]
    for change in ({"collective": "all-reduce"}, {"wire": "fp32"}, {"gradients": rows}):
        file.write_text(json.dumps({**json.loads(json.dumps(known)), **change}))
        with pytest.raises(UsageError, match=r"merged\.json.*delete the file"):
            _on(2, strategy, 2)


def test_merging_failed_planner_is_reported_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Plan:
        raise MemoryError("no room")

    monkeypatch.setitem(merge.RULES, "exact", fails)

    def body(world: Any) -> str:
        with pytest.raises(PeerError, match="rank 0 could not merge layers: MemoryError: no room"):
            _train(world, wingbeat.OMGS(steps=STEPS))
        return "told"

    assert loopback.run(loopback.worlds(3), body) == ["told"] * 3


def test_merging_limited_search_logs_bound(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(merge, "_WORK", 0)
    with caplog.at_level(logging.WARNING, logger="wingbeat"):
        results = _on(2, wingbeat.OMGS(steps=STEPS), FIRST + 1)
    assert "the search for the best plan was cut short" in caplog.text
    for _, sizes, report in results:
        assert sum(sizes[-1]) == len(list(net().parameters()))
        assert report is not None


def test_merging_compression_trial_decides_planned_wire(tmp_path: Path) -> None:
    """The trial comes first; the file is kept, and read, for what it has decided."""
    file = tmp_path / "merged.json"
    strategy = wingbeat.OMGS(
        compression=TopK(density=0.1, warmup=0), steps=STEPS, plan_file=str(file)
    )

    def body(world: Any, coded: bool) -> dict[str, Any]:
        model = net()
        model, optimizer = wingbeat.distribute(
            model, sgd(model.parameters()), strategy, world=world
        )
        engine(model).control.trial.decide(coded)
        for step in range(PLANNED + 1):
            optimizer.zero_grad()
            backward(model, world.rank, step)
            optimizer.step()
        report: dict[str, Any] = engine(model).merging.report()
        return report

    for coded, wire in ((True, "TopK(density=0.1)"), (False, "fp32")):
        loopback.run(loopback.worlds(2), lambda world, c=coded: body(world, c))
        saved = json.loads(file.read_text())
        assert (saved["wire"], saved["key"]["wire"]) == (wire, wire)


@pytest.mark.parametrize(
    ("groups", "dense"),
    [
        ({}, ()),
        ({"head.*": 1.0}, ()),
        ({"*": 0.5}, ()),
        ({"first.weight": 0.2, "*.bias": 0.9}, ()),
        ({"first.weight": 0.2}, ("first.weight", "head.bias")),
    ],
)
def test_payload_bytes_equal_bytes_in_bucket(
    groups: dict[str, float], dense: tuple[str, ...]
) -> None:
    """``dense``: as if several ranks of a replica held these parameters."""
    wire = TopK(density=0.05, warmup=0, groups=groups, auto_disable=False)

    def body(world: Any) -> tuple[float, int, bool]:
        strategy = wingbeat.OMGS(compression=wire, merge="one")
        layers = {"first": torch.nn.Linear(300, 200), "head": torch.nn.Linear(200, 300)}
        model = torch.nn.Sequential(OrderedDict(layers))
        wingbeat.distribute(model, sgd(model.parameters()), strategy, world=world)
        made = engine(model)
        parts = made.bucketing, made.compression, made.collectives
        encoded_key = CostProbe(strategy, *parts).key()
        engine(model).compression.dense = frozenset(dense)
        model(torch.ones(2, 300)).sum().backward()
        [bucket] = engine(model).buckets
        encoded = engine(model).compression._encoded(bucket)
        room = encoded.coding.room(Span(0, bucket.flat.numel()))
        probe = CostProbe(strategy, *parts)
        return sum(probe._payload_bytes()), room, probe.key() == encoded_key

    for planned, room, same_key in loopback.run(loopback.worlds(2), body):
        assert planned == pytest.approx(room, rel=0.02)
        assert same_key == (not dense)
