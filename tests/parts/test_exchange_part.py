"""What divides the classes of servers' flows: numbers, kinds of layers, or what is found out."""

from __future__ import annotations

from typing import Any

import pytest

import wingbeat
from wingbeat import parts, strategies
from wingbeat.errors import UsageError
from wingbeat.types import Serving, ThresholdTuning
from wingbeat_lab import baselines
from wingbeat_lab.bench import contenders


def serving(text: str) -> Serving:
    found = baselines.parse(text).choices().servers
    assert found is not None
    return found


def test_the_command_line_has_all_forms() -> None:
    assert serving("geryon").thresholds == (0.5,)
    assert serving("geryon:threshold=0.3").thresholds == (0.3,)
    assert serving("geryon:classes=3,threshold=0.8+0.4").thresholds == (0.8, 0.4)
    assert serving("geryon:threshold=coarse") == Serving(thresholds=(), coarse=True)
    tuned = serving("geryon:threshold=tuned,steps=7,plan_file=x.json,classes=4")
    assert tuned.tuning == ThresholdTuning(steps=7, file="x.json")
    assert tuned.thresholds == (0.75, 0.5, 0.25)
    assert [serving(f"geryon:threshold={name}").classes for name in ("coarse", "tuned")] == [2, 2]
    assert tuned.classes == 4
    assert serving("partitionedps").classes == 1


def test_a_repr_can_be_given_again() -> None:
    for given in ("tuned", "coarse", 0.3):
        strategy = wingbeat.Geryon(threshold=given)
        assert repr(strategy) == f"Geryon(threshold={given!r})"
        assert eval(repr(strategy), {"Geryon": wingbeat.Geryon}) == strategy


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"classes": 3, "threshold": "coarse"}, "'coarse'): allowed with it are classes=2"),
        ({"classes": 1, "threshold": "coarse"}, "allowed with it are classes=2"),
        ({"classes": 1, "threshold": "tuned"}, "allowed with it are classes from 2 to 4"),
        ({"classes": 1, "threshold": 0.3}, "allowed are classes from 2 to 4, or no threshold"),
        ({"classes": 1, "threshold": 7}, "threshold=7"),
        ({"threshold": "tund"}, "did you mean 'tuned'?"),
        ({"threshold": 1.5}, "1 falling numbers from 1 to 0, 'tuned'"),
        ({"threshold": (0.5, 0.2)}, "1 falling numbers"),
        ({"threshold": None}, "1 falling numbers"),
        ({"threshold": "tuned", "steps": 0}, "steps=0"),
        ({"threshold": "tuned", "file": 3}, "file=3"),
        ({"file": "x.json"}, "only thresholds that are tuned have a file"),
        ({"threshold": "coarse", "file": "x.json"}, "only thresholds that are tuned"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parts.Servers(**options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("order", ["forward", "random"])
@pytest.mark.parametrize("schedule", ["served", "wfbp"])
def test_sums_that_come_by_themselves_have_no_order_of_asking(order: str, schedule: str) -> None:
    exchange = parts.Servers(order=order)
    with pytest.raises(UsageError) as caught:
        strategies.Strategy(exchange=exchange, schedule=schedule)
    assert f"order='{order}' is one of sums that are asked for" in str(caught.value)
    assert "\n" not in str(caught.value)
    asked = strategies.Strategy(exchange=exchange, schedule="served@start")
    assert asked.choices().servers == exchange.serving()


@pytest.mark.parametrize("text", ["0.8+", "half", "0.8;0.4", ""])
def test_a_threshold_that_is_none_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match=r"such as 0\.8\+0\.4|has no value"):
        baselines.parse(f"geryon:threshold={text}")


def test_bench_waits_until_thresholds_are_decided() -> None:
    assert contenders.parse("geryon:threshold=tuned").decides
    assert not contenders.parse("geryon:threshold=coarse").decides
    assert not contenders.parse("geryon").decides
