"""Thresholds in virtual time: each division is simulated once, and the tuner finds the best."""

from __future__ import annotations

from dataclasses import replace

import pytest

from wingbeat.errors import UsageError
from wingbeat.methods.parameter_server import simulated
from wingbeat.planning.thresholds import thresholds_from_cuts
from wingbeat.simulator import Links, Model, Thresholds, TimedLayer, Work, simulate
from wingbeat.types import TensorSpec
from wingbeat_lab import baselines

LINKS = Links(bytes_per_s=1e8)
WORK = Work(fill_s_per_byte=0.0, update_s_per_byte=0.0)
NUMELS = (300_000, 300_000, 400_000, 400_000, 1_500_000, 1_500_000)
MODEL = Model(
    tuple(TimedLayer(0.01, 0.02, (i,), fully_connected=i > 3) for i in range(len(NUMELS))),
    tuple(TensorSpec(f"t{i}", (n,), "float32", 4) for i, n in enumerate(NUMELS)),
)
"""Small layers first, and two large ones in the end."""


def made(text: str = "geryon:pull=start,mb=0.5") -> Thresholds:
    return Thresholds(MODEL, baselines.parse(text), 3, LINKS, work=WORK)


def test_a_sweep_is_what_runs_with_these_thresholds_take() -> None:
    levels = made()
    assert (levels.layers, levels.classes) == (6, 2)
    found = levels.sweep((0.9, 0.5, 0.1))
    for level, seconds in found.items():
        strategy = baselines.parse(f"geryon:pull=start,mb=0.5,threshold={level}")
        assert seconds == simulate(MODEL, strategy, 3, LINKS, work=WORK, iterations=3).median_s
    assert len(set(found.values())) == 3


def test_each_division_is_simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[float, ...]] = []

    def counted(model, strategy, *args, **options):
        ran.append(strategy.exchange.levels)
        return simulate(model, strategy, *args, **options)

    monkeypatch.setattr(simulated, "simulate", counted)
    levels = made()
    levels.sweep((0.5, 0.51, 0.6))
    assert len(ran) == 1
    levels.tuned()
    assert len(ran) == len(set(ran)) == 6


@pytest.mark.parametrize("pull", ["start", "ready"])
def test_what_is_tuned_is_within_2_percent_of_the_best(pull: str) -> None:
    levels = made(f"geryon:pull={pull},mb=0.5,threshold=tuned")
    swept = levels.sweep(levels.all_levels())
    assert len(swept) == 6
    result = levels.tuned()
    assert levels.seconds(result.thresholds) <= 1.02 * min(swept.values())
    assert result.seconds(()) == swept[thresholds_from_cuts((), 6, 2)[0]]
    if pull == "start":
        assert min(swept.values()) < 0.9 * result.seconds(())


def test_more_classes_are_never_worse() -> None:
    seconds = [made(f"geryon:pull=start,mb=0.5,threshold=tuned,classes={n}") for n in (2, 3)]
    two, three = (each.seconds(each.tuned().thresholds) for each in seconds)
    assert three <= two


def test_coarse_is_the_threshold_between_the_kinds_of_layers() -> None:
    coarse = baselines.parse("geryon:pull=start,mb=0.5,threshold=coarse")
    run = simulate(MODEL, coarse, 3, LINKS, work=WORK, iterations=3)
    assert run.median_s == made().seconds(thresholds_from_cuts((4,), 6, 2))
    layers = tuple(replace(layer, fully_connected=False) for layer in MODEL.layers)
    one = simulate(replace(MODEL, layers=layers), coarse, 3, LINKS, work=WORK, iterations=3)
    assert one.median_s != run.median_s


@pytest.mark.parametrize("text", ["dear:plan=fixed", "partitionedps", "geryon:threshold=coarse"])
def test_what_has_no_thresholds_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="no thresholds divide"):
        Thresholds(MODEL, baselines.parse(text), 3, LINKS)


def test_one_bucket_is_not_divided() -> None:
    assert made("geryon:pull=start,mb=100").tuned().thresholds == thresholds_from_cuts((), 1, 2)


def test_a_run_does_not_tune() -> None:
    strategy = baselines.parse("geryon:threshold=tuned")
    with pytest.raises(UsageError, match=r"simulator\.Thresholds"):
        simulate(MODEL, strategy, 3, LINKS)
