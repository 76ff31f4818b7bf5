"""What divides the classes of servers' flows: numbers, kinds of layers, or what is found out."""

from __future__ import annotations

from typing import Any

import pytest

import wingbeat
from wingbeat import parts, strategies
from wingbeat.errors import UsageError
from wingbeat_lab import baselines
from wingbeat_lab.bench import contenders


def servers(text: str) -> parts.Servers:
    found = baselines.parse(text).exchange
    assert isinstance(found, parts.Servers)
    return found


def test_the_command_line_has_all_forms() -> None:
    assert servers("geryon").levels == (0.5,)
    assert servers("geryon:threshold=0.3").levels == (0.3,)
    assert servers("geryon:classes=3,threshold=0.8+0.4").levels == (0.8, 0.4)
    coarse = servers("geryon:threshold=coarse")
    assert coarse == parts.Servers(threshold="coarse")
    assert (coarse.levels, coarse.coarse, coarse.tuned) == ((), True, False)
    tuned = servers("geryon:threshold=tuned,steps=7,plan_file=x.json,classes=4")
    assert (tuned.tuned, tuned.steps, tuned.file) == (True, 7, "x.json")
    assert tuned.levels == (0.75, 0.5, 0.25)
    assert [servers(f"geryon:threshold={name}").classes for name in ("coarse", "tuned")] == [2, 2]
    assert tuned.classes == 4
    assert servers("partitionedps").classes == 1


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
    assert asked.exchange == exchange


@pytest.mark.parametrize("text", ["0.8+", "half", "0.8;0.4", ""])
def test_a_threshold_that_is_none_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match=r"such as 0\.8\+0\.4|has no value"):
        baselines.parse(f"geryon:threshold={text}")


def test_bench_waits_until_thresholds_are_decided() -> None:
    assert contenders.parse("geryon:threshold=tuned").decides
    assert not contenders.parse("geryon:threshold=coarse").decides
    assert not contenders.parse("geryon").decides
