"""Tuning while training: all workers change buckets together, and nothing but rounding changes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import wingbeat
from wingbeat import Strategy, parts
from wingbeat.collectives import Collectives
from wingbeat.engine.upgrade import engine_of
from wingbeat.errors import PeerError, UsageError
from wingbeat.planning.bucket_size import WARMUP
from wingbeat.planning.controllers import BucketSizeController, bucket_size_key
from wingbeat.planning.trials import LedTrial
from wingbeat.topologies import name_of
from wingbeat.transport import loopback
from wingbeat_lab.ako import Partial

TRIALS, STEPS = 4, 2
ENDS_WITHIN = TRIALS * (STEPS + WARMUP + 2) + 4
KB = 2.0**-10
Sizes = list[list[int]]


def _network(width: int = 12) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(width, width), nn.Tanh()]
    network = nn.Sequential(*layers).double()
    # Threads share the global generator.
    rng = torch.Generator().manual_seed(0)
    for param in network.parameters():
        nn.init.normal_(param, std=0.3, generator=rng)
    return network


def _train(
    world: Any,
    iterations: int = ENDS_WITHIN,
    accumulate: int = 1,
    width: int = 12,
    preset: Any = wingbeat.DeAR,
    **options: Any,
) -> tuple[list[torch.Tensor], Sizes, bool]:
    """Weights, the bucket sizes of each iteration, and whether tuning has ended."""
    model = _network(width)
    adam = torch.optim.AdamW(model.parameters(), lr=0.01)
    settings = {"plan": "bo", "mb": 4 * KB, "min_mb": 0.5 * KB, "max_mb": 8 * KB}
    settings |= {"edge_mb": 0} if preset is wingbeat.DeAR else {"first_mb": 0.5 * KB}
    strategy = preset(**{**settings, "trials": TRIALS, "steps": STEPS, **options})
    model, adam = wingbeat.distribute(model, adam, strategy, world=world)
    engine = engine_of(model)
    assert engine is not None
    sizes = []
    for step in range(iterations):
        adam.zero_grad()
        for part in range(accumulate):
            rng = torch.Generator().manual_seed(100 * step + 10 * part + world.rank)
            model(torch.randn(3, width, generator=rng).double()).square().mean().backward()
        adam.step()
        sizes.append([bucket.numel for bucket in engine.buckets])
    model.synchronize()
    ended = engine.control.tuning is None or engine.control.tuning.done
    return [p.detach().clone() for p in model.parameters()], sizes, ended


@pytest.fixture
def times_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have iterations take what the size of buckets says, least at 2 KB, on however busy cores."""

    def row(tuning: BucketSizeController, _seconds: float) -> Any:
        away = math.log2(tuning.bucket_bytes / 2048)
        return tuning._trial.report(1e-3 * (1 + away * away))

    monkeypatch.setattr(BucketSizeController, "row", row)


@pytest.mark.usefixtures("times_by_size")
@pytest.mark.parametrize(
    ("plan", "accumulate"),
    [
        ("bo", 2),
        ("random", 1),
        ("grid", 1),
        pytest.param("bo", 1, marks=pytest.mark.slow),
        pytest.param("random", 2, marks=pytest.mark.slow),
        pytest.param("grid", 2, marks=pytest.mark.slow),
    ],
)
def test_bucket_tuning_workers_change_together_and_weights_match(
    plan: str, accumulate: int
) -> None:
    def tuned(world: Any) -> tuple[list[torch.Tensor], Sizes, bool]:
        return _train(world, ENDS_WITHIN, accumulate, plan=plan)

    def fixed(world: Any) -> tuple[list[torch.Tensor], Sizes, bool]:
        return _train(world, ENDS_WITHIN, accumulate, plan="fixed")

    results = loopback.run(loopback.worlds(3), tuned)
    assert all(ended for _, _, ended in results)
    assert all(sizes == results[0][1] for _, sizes, _ in results)
    assert len({tuple(sizes) for sizes in results[0][1]}) > 2
    expected = loopback.run(loopback.worlds(3), fixed)[0][0]
    for weights, _, _ in results:
        for got, want in zip(weights, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("times_by_size")
@pytest.mark.parametrize(
    ("plan", "accumulate", "options"),
    [("bo", 1, {}), ("grid", 2, {}), ("random", 1, {"topology": "mesh"})],
)
def test_bucket_tuning_whole_all_reduces_are_tuned(
    plan: str, accumulate: int, options: dict[str, Any]
) -> None:
    def trained(world: Any, plan: str) -> tuple[list[torch.Tensor], Sizes, bool]:
        return _train(
            world, ENDS_WITHIN, accumulate, preset=wingbeat.AllReduce, plan=plan, **options
        )

    results = loopback.run(loopback.worlds(3), lambda world: trained(world, plan))
    assert all(ended for _, _, ended in results)
    assert all(sizes == results[0][1] for _, sizes, _ in results)
    assert len({tuple(sizes) for sizes in results[0][1]}) > 1
    expected = loopback.run(loopback.worlds(3), lambda world: trained(world, "fixed"))[0][0]
    for weights, _, _ in results:
        for got, want in zip(weights, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_bucket_tuning_topologies_are_tuned_and_weights_match(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    along: dict[int, list[str]] = {rank: [] for rank in range(3)}
    scatter = Collectives.reduce_scatter

    def noting(collectives: Collectives, *args: Any, **options: Any) -> Any:
        along[collectives.world.rank].append(name_of(collectives._topology))
        return scatter(collectives, *args, **options)

    file = tmp_path / "plan.json"
    options = {"plan": "grid", "tune_topology": True, "trials": 6, "plan_file": str(file)}
    with monkeypatch.context() as patch:
        patch.setattr(Collectives, "reduce_scatter", noting)
        results = loopback.run(
            loopback.worlds(3), lambda world: _train(world, 2 * ENDS_WITHIN, **options)
        )
    assert all(ended for _, _, ended in results)
    assert set(along[0]) == {"ring", "mesh", "doubling"}
    assert along[2] == along[1] == along[0]
    kept = json.loads(file.read_text())
    assert kept["chosen_topology"] == along[0][-1]
    assert kept["key"]["topologies"] == ["ring", "mesh", "doubling"]
    expected = loopback.run(
        loopback.worlds(3), lambda world: _train(world, 2 * ENDS_WITHIN, plan="fixed")
    )[0][0]
    for weights, _, _ in results:
        for got, want in zip(weights, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_bucket_tuning_topology_from_file_is_used_at_once(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    options = {"plan_file": str(file), "tune_topology": True, "plan": "random"}
    loopback.run(loopback.worlds(3), lambda world: _train(world, **options))
    text = file.read_text()
    kept = json.loads(text)["chosen_topology"]

    def body(world: Any) -> str:
        model = _network()
        sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        sizes = {"mb": 4 * KB, "min_mb": 0.5 * KB, "max_mb": 8 * KB, "edge_mb": 0}
        strategy = wingbeat.DeAR(**sizes, trials=TRIALS, steps=STEPS, **options)
        model, sgd = wingbeat.distribute(model, sgd, strategy, world=world)
        engine = engine_of(model)
        assert engine is not None
        tuning = engine.control.tuning
        assert tuning is not None
        assert tuning.done
        assert tuning.topology == name_of(tuning._collectives._topology)
        return tuning.topology

    assert loopback.run(loopback.worlds(3), body) == [kept] * 3


@pytest.mark.parametrize(
    ("workers", "options", "why"),
    [
        (2, {}, "2 workers on these links have one"),
        (3, {"compression": "topk"}, "a codec goes along its own"),
    ],
)
def test_bucket_tuning_single_topology_tunes_sizes_only_and_logs_reason(
    workers: int, options: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(
        "wingbeat.planning.controllers.log.info", lambda words, *args: told.append(words % args)
    )
    loopback.run(
        loopback.worlds(workers), lambda world: _train(world, 2, tune_topology=True, **options)
    )
    assert told[0] == f"topologies are not tuned: {why}"


def test_plan_file_of_other_schedule_is_not_used(tmp_path: Path) -> None:
    file = str(tmp_path / "plan.json")
    for preset in (wingbeat.DeAR, wingbeat.AllReduce, wingbeat.DeAR):
        loopback.run(
            loopback.worlds(2), lambda world, p=preset: _train(world, preset=p, plan_file=file)
        )
        schedule = "dear" if preset is wingbeat.DeAR else "wfbp"
        assert json.loads(Path(file).read_text())["key"]["schedule"] == schedule
    kept = Path(file).read_text()
    again = loopback.run(loopback.worlds(2), lambda world: _train(world, plan_file=file))
    assert all(len({tuple(sizes) for sizes in own[1][1:]}) == 1 for own in again)
    assert Path(file).read_text() == kept


def test_bucket_tuning_with_lbfgs_works() -> None:
    def body(world: Any, plan: str) -> list[torch.Tensor]:
        model = _network()
        lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
        sizes = {"mb": 4 * KB, "min_mb": 0.5 * KB, "max_mb": 8 * KB, "first_mb": 0.5 * KB}
        strategy = wingbeat.AllReduce(plan=plan, trials=TRIALS, steps=STEPS, **sizes)
        model, lbfgs = wingbeat.distribute(model, lbfgs, strategy, world=world)
        rng = torch.Generator().manual_seed(world.rank)
        x = torch.randn(8, 12, generator=rng).double()

        def closure() -> torch.Tensor:
            lbfgs.zero_grad()
            loss: torch.Tensor = model(x).square().mean()
            loss.backward()
            return loss

        for _ in range(ENDS_WITHIN):
            lbfgs.step(closure)
        engine = engine_of(model)
        assert engine is not None
        tuning = engine.control.tuning
        assert tuning is None or tuning.done
        return [p.detach().clone() for p in model.parameters()]

    tuned, fixed = (
        loopback.run(loopback.worlds(2), lambda world, p=plan: body(world, p))
        for plan in ("bo", "fixed")
    )
    for mine, other, want in zip(tuned[0], tuned[1], fixed[0], strict=True):
        assert torch.equal(mine, other)
        torch.testing.assert_close(mine, want, rtol=1e-6, atol=1e-9)


class _Late:
    """A stopwatch that knows each lap one lap later, as on a GPU."""

    def __init__(self, _device: torch.device) -> None:
        self.marks = 0

    def lap(self) -> float:
        self.marks += 1
        return float(self.marks > 2)

    def restart(self) -> None:
        self.marks = 1


def test_bucket_tuning_times_of_previous_size_are_not_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: dict[int, list[float]] = {}
    report = LedTrial.report

    def heard(tuner: LedTrial[Any, Any], seconds: float) -> list[float]:
        row = report(tuner, seconds)
        if tuner._rank == 0:
            told.setdefault(int(row[1]), []).append(row[0])
        return row

    monkeypatch.setattr(LedTrial, "report", heard)
    monkeypatch.setattr("wingbeat.planning.control.IterationTimer", _Late)
    loopback.run(loopback.worlds(2), lambda world: _train(world, 2 * ENDS_WITHIN))
    assert len(told) == TRIALS
    for seconds in told.values():
        assert seconds[:2] == [0.0, 0.0]
        assert all(seconds[2:])


WINDOW = 4
"""Iterations of a window in the tests of drift."""


class _Scripted:
    """A stopwatch whose laps follow from their number alone."""

    seconds: Callable[[int], float]

    def __init__(self, _device: torch.device) -> None:
        self.laps = 0

    def lap(self) -> float:
        self.laps += 1
        return type(self).seconds(self.laps)

    def restart(self) -> None:
        pass


def _tuned_in_virtual_time(
    monkeypatch: pytest.MonkeyPatch,
    seconds: Callable[[int], float],
    iterations: int,
    **options: Any,
) -> list[tuple[Sizes, list[int]]]:
    """The bucket sizes of each iteration, and laps of which tuning begins again, by worker."""
    monkeypatch.setattr("wingbeat.planning.trials.DRIFT_WINDOW", WINDOW)
    clock = type("_Clock", (_Scripted,), {"seconds": staticmethod(seconds)})
    monkeypatch.setattr("wingbeat.planning.control.IterationTimer", clock)
    begun: dict[int, list[int]] = {}
    watched = BucketSizeController.boundary

    def boundary(tuning: BucketSizeController, lap: float, rows: Any) -> bool:
        before = tuning.done
        result = watched(tuning, lap, rows)
        own = begun.setdefault(tuning._collectives.world.rank, [])
        if before and not tuning.done:
            own.append(int(lap))
        return result

    monkeypatch.setattr(BucketSizeController, "boundary", boundary)
    made = loopback.run(
        loopback.worlds(2), lambda world: _train(world, iterations, plan="grid", **options)
    )
    assert all(sizes == made[0][1] for _, sizes, _ in made)
    return [(sizes, begun[rank]) for rank, (_, sizes, _) in enumerate(made)]


def test_bucket_tuning_drift_restarts_on_all_workers_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    since = ENDS_WITHIN + 3 * (WINDOW + WARMUP)
    iterations = since + 5 * (WINDOW + WARMUP) + ENDS_WITHIN

    def seconds(lap: int) -> float:
        return 1.0 if lap < since else 2.0

    (sizes, begun), other = _tuned_in_virtual_time(monkeypatch, seconds, iterations)
    assert other == (sizes, begun)
    assert begun == [2], "once, after laps of two seconds"
    at_rest = sizes[since - 1]
    assert all(now == at_rest for now in sizes[ENDS_WITHIN:since])
    assert len({tuple(now) for now in sizes[since:]}) > 2, "other sizes are tried"


@pytest.mark.parametrize(
    ("slow", "options"),
    [
        pytest.param(range(60, 60 + WINDOW), {}, id="one window"),
        pytest.param(range(60, 10_000), {"drift": 2.5}, id="less than drift"),
    ],
)
def test_bucket_tuning_short_or_small_drift_does_not_restart(
    monkeypatch: pytest.MonkeyPatch, slow: range, options: dict[str, Any]
) -> None:
    def seconds(lap: int) -> float:
        return 2.0 if lap in slow else 1.0

    made = _tuned_in_virtual_time(monkeypatch, seconds, 60 + 8 * (WINDOW + WARMUP), **options)
    assert [begun for _, begun in made] == [[], []]


def test_bucket_tuning_periodic_drift_restarts_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def seconds(lap: int) -> float:
        return 1.0 + lap // 75 % 2

    (_, begun), _ = _tuned_in_virtual_time(monkeypatch, seconds, 600)
    # Each swing of 75 iterations is long enough for 2 and for 4 windows; not for 16.
    assert 2 <= len(begun) <= 3


def test_bucket_tuning_size_from_file_is_watched_for_drift(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = {"plan_file": str(tmp_path / "plan.json")}
    _tuned_in_virtual_time(monkeypatch, lambda _: 1.0, ENDS_WITHIN, **options)
    made = _tuned_in_virtual_time(
        monkeypatch, lambda lap: 1.0 if lap < 20 else 3.0, 50 + ENDS_WITHIN, **options
    )
    assert [begun for _, begun in made] == [[3], [3]]


def test_plan_file_is_written_and_skips_next_tuning(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"

    def body(world: Any) -> tuple[list[torch.Tensor], Sizes, bool]:
        return _train(world, plan_file=str(file))

    first = loopback.run(loopback.worlds(2), body)
    found = json.loads(file.read_text())["chosen_bytes"]
    second = loopback.run(loopback.worlds(2), body)
    # The first iteration follows the definition order: only then is the plan made that lasts.
    assert all(len({tuple(sizes) for sizes in own[1][1:]}) == 1 for own in second)
    assert second[0][1][-1] == first[0][1][-1]
    assert json.loads(file.read_text())["chosen_bytes"] == found


def test_plan_file_of_other_cluster_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    for size in (2, 3):
        loopback.run(loopback.worlds(size), lambda world: _train(world, plan_file=str(file)))
        assert json.loads(file.read_text())["key"]["workers"] == size


@pytest.mark.parametrize(
    "other",
    [
        {"compression": "bf16"},
        {"topology": "mesh"},
        {"shard_optimizer": True},
        {"mb": 10 * KB, "min_mb": 9 * KB, "max_mb": 20 * KB},
    ],
)
def test_plan_file_of_other_strategy_is_replaced(other: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    for options in ({}, other):
        loopback.run(
            loopback.worlds(2), lambda world, o=options: _train(world, plan_file=str(file), **o)
        )
        file_says = json.loads(file.read_text())
        assert file_says["key"]["wire"] == (
            "bfloat16" if "compression" in options else "as computed"
        )
        assert file_says["key"]["topology"] == options.get("topology", "ring")
        assert file_says["key"]["shard_optimizer"] == ("shard_optimizer" in options)
    assert file_says["high_bytes"] == pytest.approx(other.get("max_mb", 8 * KB) * 2**20, rel=0.1)


def test_bucket_size_key_differs_for_partial_exchange() -> None:
    bucketing: Any = SimpleNamespace(specs=[])
    collectives: Any = SimpleNamespace(world=SimpleNamespace(size=2, links=(None,)))
    plan = parts.TunedBuckets()
    keys = [
        bucket_size_key(bucketing, collectives, Strategy(plan=plan, exchange=exchange))
        for exchange in ("mesh", Partial(), Partial(partitions=4))
    ]
    assert keys[0] != keys[1] != keys[2] != keys[0]
    assert "partitions" not in keys[0]


def test_plan_file_of_other_model_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    seen = []
    for width in (12, 13):
        loopback.run(
            loopback.worlds(2), lambda world, w=width: _train(world, plan_file=str(file), width=w)
        )
        seen.append(json.loads(file.read_text())["key"]["parameters"])
    assert seen[0] != seen[1]


def test_bucket_tuning_never_exceeds_model_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "plan.json"
    told: list[str] = []
    monkeypatch.setattr(
        "wingbeat.planning.controllers.log.info", lambda words, *_args: told.append(words)
    )
    whole = 8 * sum(p.numel() for p in _network().parameters())
    wide = {"mb": 25.0, "max_mb": 100.0, "plan_file": str(file)}

    def body(world: Any) -> tuple[list[torch.Tensor], Sizes, bool]:
        return _train(world, **wide)

    results = loopback.run(loopback.worlds(3), body)
    assert all(ended for _, _, ended in results)
    assert all(sizes == results[0][1] for _, sizes, _ in results)
    tried = json.loads(file.read_text())
    sizes = [sample["bucket_bytes"] for sample in tried["samples"]]
    assert sizes[0] == whole  # what 25 MB are for this model
    assert max(sizes) <= whole == tried["high_bytes"]
    assert sum("hold the whole model" in words for words in told) == 1
    # The next run takes over what was found in a range that is wider than the model.
    assert all(len({tuple(s) for s in own[1][1:]}) == 1 for own in loopback.run(
        loopback.worlds(3), body))  # fmt: skip


@pytest.mark.parametrize("accumulate", [1, 2])
def test_bucket_tuning_single_plan_ends_with_first_iteration(
    accumulate: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "plan.json"
    told: list[str] = []
    monkeypatch.setattr(
        "wingbeat.planning.controllers.log.info", lambda words, *args: told.append(words % args)
    )
    sent: list[int] = []
    row = BucketSizeController.row

    def counted(tuning: BucketSizeController, seconds: float) -> Any:
        sent.append(tuning._collectives.world.rank)
        return row(tuning, seconds)

    monkeypatch.setattr(BucketSizeController, "row", counted)
    options = {"mb": 25.0, "min_mb": 1.0, "max_mb": 100.0, "plan_file": str(file)}
    results = loopback.run(
        loopback.worlds(3), lambda world: _train(world, 4, accumulate, **options)
    )
    assert all(ended for _, _, ended in results)
    assert all(len(sizes[-1]) == 1 for _, sizes, _ in results)
    assert sorted(sent) == [0, 1, 2]  # one row each, before the order was known
    words = (
        "nothing to tune: for this model bucket sizes from 1 to 100 MB are all one plan, 1 bucket"
    )
    assert told == [words, f"bucket size kept in plan file {file}"]
    assert json.loads(file.read_text())["summary"] == words
    loopback.run(loopback.worlds(3), lambda world: _train(world, 4, **options))
    assert told[2:] == [f"buckets of 25 MB, from plan file {file}"]


@pytest.mark.parametrize("content", [None, "{"])
def test_plan_file_unusable_is_refused_on_every_rank(content: str | None, tmp_path: Path) -> None:
    file = tmp_path / "missing" / "plan.json"
    if content is not None:
        file.parent.mkdir()
        file.write_text(content)

    def body(world: Any) -> str:
        with pytest.raises(UsageError, match=r"plan\.json") as caught:
            _train(world, plan_file=str(file))
        return str(caught.value)

    said = loopback.run(loopback.worlds(2), body)
    assert said[0] == said[1]
    assert "\n" not in said[0]


def test_bucket_tuning_invalid_decision_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    row = BucketSizeController.row

    def garbled(tuning: BucketSizeController, seconds: float) -> Any:
        said = list(row(tuning, seconds))
        if tuning._collectives.world.rank == 0:
            said[4] = 1e12
        return said

    monkeypatch.setattr(BucketSizeController, "row", garbled)

    def body(world: Any) -> str:
        with pytest.raises(
            PeerError, match="rank 0 sent a malformed row for the bucket tuning"
        ) as caught:
            _train(world)
        return str(caught.value)

    assert all("size" in said for said in loopback.run(loopback.worlds(2), body))


def test_bucket_tuning_failed_backward_keeps_workers_in_step() -> None:
    def body(world: Any) -> Sizes:
        model = _network()
        sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        strategy = wingbeat.DeAR(
            mb=4 * KB, min_mb=0.5 * KB, max_mb=8 * KB, edge_mb=0, trials=3, steps=2
        )
        model, sgd = wingbeat.distribute(model, sgd, strategy, world=world)
        engine = engine_of(model)
        assert engine is not None
        sizes = []
        for step in range(24):
            sgd.zero_grad()
            loss = model(torch.ones(1, 12).double()).sum()
            # In the first backward the orders are learnt, in the sixth sizes are changing.
            skipped = step in (0, 5)
            if skipped and world.rank == 1:
                handle = model[4].weight.register_hook(_raise)
                with pytest.raises(ZeroDivisionError):
                    loss.backward()
                handle.remove()
            else:
                loss.backward()
            if skipped:
                continue
            sgd.step()
            sizes.append([bucket.numel for bucket in engine.buckets])
        assert engine.control.tuning is not None
        assert engine.control.tuning.done
        return sizes[-5:]

    results = loopback.run(loopback.worlds(2), body)
    assert results[0] == results[1]


def _raise(_grad: torch.Tensor) -> None:
    raise ZeroDivisionError
