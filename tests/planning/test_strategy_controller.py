"""Strategies that change while training: together on all workers, and nothing else changes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import wingbeat
from helpers.sums import Sums, step, trained_on, weights
from helpers.sums import given as numbers_of
from helpers.training import TINY_MB, adamw, backward, engine, net, train
from helpers.training import weights as weights_of
from wingbeat import Strategy, parts
from wingbeat.collectives import Collectives, encoded_of
from wingbeat.engine.api import default_strategy
from wingbeat.errors import PeerError, UsageError
from wingbeat.planning import controllers, trials
from wingbeat.planning.control import Decisions
from wingbeat.planning.controllers import StrategyController
from wingbeat.planning.plans import make_plan
from wingbeat.schedules import Wfbp
from wingbeat.topologies import Hierarchical, Layout, name_of
from wingbeat.transport import loopback

SIZE, MOST = 3, 34
"""With a step in each turn, a trial takes 1 + 10 * 3 iterations at most."""
CHOSEN = Strategy(plan=parts.Chosen(mb=TINY_MB, steps=1), schedule="dear")
CANDIDATES = parts.Chosen(mb=TINY_MB).candidates("mesh")
NAMES = [each.name for each in CANDIDATES]

Body = Callable[[Any], Any]


def run(body: Body, size: int = SIZE, layout: Layout | None = None) -> list[Any]:
    worlds = loopback.worlds(size, layout=layout)
    try:
        return loopback.run(worlds, body)
    finally:
        for world in worlds:
            world.close()


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []

    def note(text: str, *args: Any) -> None:
        told.append(text % args)

    def note_event(event: str, text: str, *, rank: int) -> None:
        assert (event, rank) == ("strategy-changed", 0)
        told.append(text)

    monkeypatch.setattr(controllers, "log_event", note_event)
    monkeypatch.setattr(controllers.log, "info", note)
    monkeypatch.setattr(controllers.log, "warning", note)
    return told


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Have iterations take what this says by name, else a second, on however busy cores."""
    by_name: dict[str, float] = {}
    row, boundary = StrategyController.row, StrategyController.boundary

    def timed_row(choosing: StrategyController, _seconds: float) -> Sequence[float]:
        return row(choosing, by_name.get(choosing.name, 1.0))

    def timed_boundary(choosing: StrategyController, _seconds: float, rows: Any) -> bool:
        return boundary(choosing, by_name.get(choosing.name, 1.0), rows)

    monkeypatch.setattr(StrategyController, "row", timed_row)
    monkeypatch.setattr(StrategyController, "boundary", timed_boundary)
    return by_name


@pytest.fixture
def each_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the next candidate in each iteration after the first."""

    def boundary(choosing: StrategyController, _seconds: float, _rows: Any) -> bool:
        if not choosing._bucketing.learning:
            place = choosing._possible.index(choosing._current) + 1
            choosing._use(choosing._possible[place % len(choosing._possible)])
        return True

    monkeypatch.setattr(StrategyController, "boundary", boundary)


def trained(
    world: Any, strategy: Any = CHOSEN, iterations: int = MOST
) -> tuple[list[tuple[str, bool]], dict[str, Tensor]]:
    """Return the candidate of each iteration, and whether it was chosen; and the weights."""
    model = net()
    model, optimizer = wingbeat.distribute(model, adamw(model.parameters()), strategy, world=world)
    choosing = engine(model).control.choosing
    used = []
    for number in range(iterations):
        train(model, optimizer, range(number, number + 1))
        used.append((choosing.name, choosing.done) if choosing else ("", True))
    wingbeat.release(model, optimizer)
    return used, weights_of(model)


@pytest.mark.parametrize("best", [NAMES[1], NAMES[4]])
def test_strategies_are_tried_on_all_workers_at_once_and_fastest_stays(
    best: str, times: dict[str, float], log: list[str]
) -> None:
    times[best] = 0.5
    found = run(trained)
    used = found[0][0]
    assert all(each[0] == used for each in found)
    assert {name for name, _ in used} == set(NAMES)
    assert used[-1] == (best, True)
    assert not used[1][1]
    told = [line for line in log if "chosen in" in line]
    assert len(told) == 1, log
    assert told[0].startswith(f"{best} chosen in ")
    assert told[0].count("takes 2.000") == len(NAMES) - 1
    # Same sums in other orders; the optimizer amplifies differences.
    for name, want in run(lambda world: trained(world, wingbeat.AllReduce()))[0][1].items():
        torch.testing.assert_close(found[0][1][name], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("best", "text"),
    [
        (NAMES[0], f"it chose {NAMES[0]}; {NAMES[1]}, as DDP, took 1.5 s"),
        (NAMES[1], f"it chose {NAMES[1]}, which has DDP's schedule"),
    ],
)
def test_after_the_trial_rank_0_compares_the_choice_with_the_schedule_of_ddp(
    best: str, text: str, times: dict[str, float], tmp_path: Path
) -> None:
    times |= {NAMES[1]: 1.5, best: 0.5}
    kept = Strategy(
        plan=parts.Chosen(mb=TINY_MB, steps=1, file=str(tmp_path / "plan.json")), schedule="dear"
    )

    def compared(world: Any) -> tuple[str, str]:
        model = net()
        optimizer = adamw(model.parameters())
        with _distributed(model, optimizer, kept, world):
            compare = engine(model).meter.compare
            before = compare()
            train(model, optimizer, range(MOST))
            return before, compare()

    assert NAMES[1].startswith("AllReduce(")
    assert run(compared) == [("", text), ("", ""), ("", "")]
    assert run(compared)[0] == (text, text)  # from the plan file


@contextmanager
def _distributed(model: Any, optimizer: Any, strategy: Any, world: Any) -> Iterator[Any]:
    model, optimizer = wingbeat.distribute(model, optimizer, strategy, world=world)
    yield model, optimizer
    wingbeat.release(model, optimizer)


@pytest.mark.usefixtures("each_iteration")
def test_each_iteration_equals_that_of_the_strategy_by_that_name_bit_for_bit() -> None:
    def changing(world: Any) -> tuple[list[str], list[dict[str, Tensor]]]:
        model = net()
        model, optimizer = wingbeat.distribute(
            model, adamw(model.parameters()), CHOSEN, world=world
        )
        names, found = [], []
        for number in range(8):
            train(model, optimizer, range(number, number + 1))
            names.append(engine(model).control.choosing.name)
            whole = isinstance(engine(model).runtime.schedule, Wfbp)
            assert whole == names[-1].startswith("AllReduce")
            found.append(weights_of(model))
        wingbeat.release(model, optimizer)
        return names, found

    names, found = run(changing)[0]
    assert set(names[1:]) == set(NAMES)

    def separate(world: Any) -> list[dict[str, Tensor]]:
        model = net()
        optimizer = adamw(model.parameters())
        found = []
        for number, name in enumerate(names):
            strategy = eval(name, {"AllReduce": wingbeat.AllReduce, "DeAR": wingbeat.DeAR})
            with _distributed(model, optimizer, strategy, world) as (one, its):
                if number:  # learn the order of gradients
                    backward(one, world.rank, number)
                    its.zero_grad()
                train(one, its, range(number, number + 1))
                found.append(weights_of(one))
        return found

    for number, (got, want) in enumerate(zip(found, run(separate)[0], strict=True)):
        for name, value in want.items():
            assert torch.equal(got[name], value), (number, names[number], name)


@pytest.mark.usefixtures("each_iteration")
def test_gradients_that_accumulate_over_changes_are_kept() -> None:
    def accumulated(world: Any, strategy: Any) -> dict[str, Tensor]:
        model = net()
        model, optimizer = wingbeat.distribute(
            model, adamw(model.parameters()), strategy, world=world
        )
        for number in range(4):
            optimizer.zero_grad()
            for part in range(3):
                backward(model, world.rank, 3 * number + part)
            optimizer.step()
        wingbeat.release(model, optimizer)
        return weights_of(model)

    found = run(lambda world: accumulated(world, CHOSEN))
    want = run(lambda world: accumulated(world, wingbeat.AllReduce()))[0]
    for name, value in want.items():
        assert all(torch.equal(found[0][name], other[name]) for other in found)
        torch.testing.assert_close(found[0][name], value, rtol=1e-4, atol=1e-5)


def test_candidates_with_equal_buckets_are_tried_once(times: dict[str, float]) -> None:
    del times  # all alike
    large = Strategy(plan=parts.Chosen(steps=1), schedule="dear")
    used = run(lambda world: trained(world, large), size=2)[0][0]
    tried = [name for name, done in used if not done]
    assert list(dict.fromkeys(tried)) == [
        "DeAR(plan='fixed', mb=25)", "AllReduce(mb=25, first_mb=1)", "DeAR(plan='layers@1')",
    ]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_choice_of_earlier_training_is_used_from_first_iteration_on(name: str) -> None:
    """As benches apply it: what is timed is what was chosen."""

    def body(world: Any) -> tuple[list[list[str]], str]:
        model = net()
        model, optimizer = wingbeat.distribute(
            model, adamw(model.parameters()), CHOSEN, world=world
        )
        own = engine(model)
        assert own.control is not None
        own.control.keep(Decisions(strategy=name))
        assert not own.control.deciding()
        started: list[str] = []
        for kind in ("all_reduce", "reduce_scatter", "all_gather"):
            start = getattr(own.collectives, kind)

            def noting(*args: Any, kind: str = kind, start: Any = start, **options: Any) -> Any:
                if options.get("bucket", -1) >= 0:
                    started.append(kind)
                return start(*args, **options)

            setattr(own.collectives, kind, noting)
        found = []
        for number in range(3):
            started.clear()
            train(model, optimizer, range(number, number + 1))
            found.append(sorted(set(started)))
            placeholders = {slot.pending is not None for slot in own.slots}
            assert placeholders == {not name.startswith("AllReduce")}
        fusion = next(each.fusion for each in CANDIDATES if each.name == name)
        plan = make_plan(fusion, own.bucketing.specs, own.bucketing.ready_order)
        assert [len(each.slots) for each in own.buckets] == [len(b.tensors) for b in plan.buckets]
        topology = name_of(own.collectives._topology)
        wingbeat.release(model, optimizer)
        return found, topology

    found = run(body)
    assert all(each == found[0] for each in found)
    halves = ["all_reduce"] if name.startswith("AllReduce") else ["all_gather", "reduce_scatter"]
    assert found[0] == ([halves] * 3, "mesh" if "mesh" in name else "ring")


def test_choice_in_plan_file_is_used_at_once(
    tmp_path: Path, times: dict[str, float], log: list[str]
) -> None:
    file = str(tmp_path / "plan.json")
    kept = Strategy(plan=parts.Chosen(mb=TINY_MB, steps=1, file=file), schedule="dear")
    times[NAMES[1]] = 0.5
    run(lambda world: trained(world, kept))
    saved = json.loads(Path(file).read_text())
    assert saved["chosen"] == NAMES[1]
    assert [each["name"] for each in saved["tried"]] == NAMES
    text = Path(file).read_text()
    log.clear()
    again = run(lambda world: trained(world, kept, 3))
    assert all(used == [(NAMES[1], True)] * 3 for used, _ in again)
    assert log == [f"{NAMES[1]}, from plan file {file}"]
    assert Path(file).read_text() == text
    # It says nothing about other workers.
    log.clear()
    used = run(lambda world: trained(world, kept, 3), size=2)[0][0]
    assert not used[0][1]
    assert any("for another model, cluster or strategy" in line for line in log)


def test_choice_malformed_by_rank_0_is_a_peer_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controllers, "known_choice", lambda *_args: ["Canary()"])
    plan = parts.Chosen(mb=TINY_MB, file=str(tmp_path / "plan.json"))
    with pytest.raises(PeerError, match=r"malformed strategy: \['Canary\(\)'\]"):
        run(lambda world: trained(world, Strategy(plan=plan, schedule="dear")))


def test_drift_begins_another_trial_on_all_workers(
    times: dict[str, float], log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "DRIFT_WINDOW", 3)
    times[NAMES[1]] = 0.5

    def body(world: Any) -> list[tuple[str, bool]]:
        model = net()
        model, optimizer = wingbeat.distribute(
            model, adamw(model.parameters()), CHOSEN, world=world
        )
        choosing, used = engine(model).control.choosing, []
        for number in range(100):
            train(model, optimizer, range(number, number + 1))
            if number == 50:
                times.update({NAMES[1]: 5.0, NAMES[3]: 0.25})
            used.append((choosing.name, choosing.done))
        wingbeat.release(model, optimizer)
        return used

    found = run(body)
    assert all(each == found[0] for each in found)
    assert found[0][50] == (NAMES[1], True)
    assert not all(done for _, done in found[0][51:])
    assert found[0][-1] == (NAMES[3], True)
    again = [line for line in log if "trying strategies again" in line]
    assert again == [
        f"iterations take 5 s in place of 0.5 s with {NAMES[1]}: trying strategies again"
    ]


@pytest.mark.parametrize(("hosts", "direct"), [(2, {False}), (3, {False, True})])
def test_direct_exchange_is_tried_where_three_hosts_have_several_workers(
    hosts: int, direct: set[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    along: set[bool] = set()
    scatter = Collectives.reduce_scatter

    def noting(collectives: Collectives, *args: Any, **options: Any) -> Any:
        if collectives.world.rank == 0:
            assert isinstance(collectives._topology, Hierarchical)
            along.add(collectives._topology.direct)
        return scatter(collectives, *args, **options)

    monkeypatch.setattr(Collectives, "reduce_scatter", noting)
    found = run(trained, size=2 * hosts, layout=Layout.even(hosts, 2))
    used = found[0][0]
    assert any("topology='mesh'" in name for name, _ in used) == (True in direct)
    assert along == direct


@pytest.mark.usefixtures("each_iteration")
def test_what_a_codec_has_not_sent_is_sent_when_it_is_left() -> None:
    """Gradients do not depend on weights: at the end these are the sum of all gradients."""
    strategy = Strategy(
        plan=parts.Chosen(mb=TINY_MB),
        compression=parts.Sketch(bits=3, auto_disable=False),
        schedule="dear",
    )
    batches, size = 14, 2

    def wanted(count: int) -> dict[str, Tensor]:
        return trained_on([numbers_of(n, r) for n in range(count) for r in range(size)], size)

    def body(world: Any) -> tuple[list[str], list[dict[str, Tensor]]]:
        model = Sums()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model, optimizer = wingbeat.distribute(model, optimizer, strategy, world=world)
        names, found = [], []
        for number in range(batches):
            step(model, optimizer, numbers_of(number, world.rank))
            names.append(engine(model).control.choosing.name)
            found.append(weights(model))
            wires = [encoded_of(bucket.wire) for bucket in engine(model).buckets]
            codecs = [region.codec for each in wires if each for region in each.coding.regions]
            bits = names[-1].partition("Sketch(bits=")[2][:1]
            sketched = {str(codec.bits) for codec in codecs if not codec.lossless}
            assert sketched == ({bits} if bits else set()), names[-1]
        wingbeat.release(model, optimizer)
        return names, found

    (names, found), *_ = run(body, size)
    coded = ["Sketch(bits=" in name for name in names]
    assert coded[-4:] == [True, True, False, False]
    assert {name.partition("Sketch(bits=")[2][:1] for name in names} == {"", "1", "3"}
    for number in range(batches):
        want = wanted(number + 1)
        off = max(float((found[number][name] - value).abs().max()) for name, value in want.items())
        assert off > 0.01 if coded[number] else off < 1e-4, (number, names[number], off)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"schedule": "wfbp"}, "allowed: a topology, schedule=Decoupled"),
        ({"schedule": "dear", "update": "sharded"}, "each worker has the whole optimizer"),
    ],
)
def test_parts_that_allow_no_other_schedule_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        Strategy(plan="chosen", **options)


def test_distribute_without_strategy_tries_as_auto_does(log: list[str]) -> None:
    def body(world: Any) -> Any:
        model = net()
        optimizer = adamw(model.parameters())
        given = () if world.rank else (wingbeat.Auto(),)  # all ranks the same, by either way
        model, optimizer = wingbeat.distribute(model, optimizer, *given, world=world)
        strategy, control = engine(model).strategy, engine(model).control
        assert control is not None
        train(model, optimizer, range(5))  # fewer than a trial
        choosing = control.choosing is not None and control.deciding()
        wingbeat.release(model, optimizer)
        return strategy, choosing, weights_of(model)

    found = run(body)
    assert all(each[0] == wingbeat.Auto() and each[1] for each in found)
    assert not log
    plain = run(lambda world: trained(world, wingbeat.AllReduce(), 5))
    for name, want in plain[0][1].items():
        assert all(torch.equal(found[0][2][name], each[2][name]) for each in found)
        torch.testing.assert_close(found[0][2][name], want, rtol=1e-4, atol=1e-5)


def test_distribute_without_strategy_takes_what_auto_cannot_try() -> None:
    lbfgs = torch.optim.LBFGS(net().parameters())
    assert default_strategy(lbfgs, meshed=False) == wingbeat.AllReduce()
    sgd = torch.optim.SGD(net().parameters(), lr=0.1)
    assert default_strategy(sgd, meshed=True) == wingbeat.AllReduce()
    assert repr(default_strategy(sgd, meshed=False)) == repr(wingbeat.Auto())


def test_distribute_without_strategy_alone_trains_as_plain_loop() -> None:
    def body(world: Any) -> dict[str, Tensor]:
        model = net()
        model, optimizer = wingbeat.distribute(model, adamw(model.parameters()), world=world)
        train(model, optimizer, range(3))
        wingbeat.release(model, optimizer)
        return weights_of(model)

    plain = net()
    optimizer = adamw(plain.parameters())
    for number in range(3):
        optimizer.zero_grad()
        backward(plain, 0, number)
        optimizer.step()
    for name, want in weights_of(plain).items():
        assert torch.equal(run(body, 1)[0][name], want)


def test_auto_asynchronous_is_refused_in_one_line() -> None:
    with pytest.raises(
        UsageError, match=r"Auto\(asynchronous=True\): a training cannot .*use Ripples"
    ):
        wingbeat.Auto(asynchronous=True)


def test_auto_is_exact_unless_told_otherwise() -> None:
    assert wingbeat.Auto().traits.exact
    assert not wingbeat.Auto(exact=False).traits.exact
