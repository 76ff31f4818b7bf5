"""Compositions on the command line."""

from __future__ import annotations

import pytest

import wingbeat
from wingbeat import Strategy, parts
from wingbeat.errors import UsageError
from wingbeat.strategies import PRESETS, names, parse


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("strategy", Strategy()),
        (
            "strategy:plan=merged,compression=sketch@4,schedule=dear",
            Strategy(plan=parts.Merged(), compression="sketch@4", schedule=parts.Decoupled()),
        ),
        (
            "strategy:plan=bo,exchange=doubling",
            Strategy(plan=parts.TunedBuckets(), exchange=parts.Doubling()),
        ),
        (
            "Strategy:schedule=dear,update=sharded",
            wingbeat.Strategy(schedule="dear", update=parts.Sharded()),
        ),
        ("dear:plan=merged,compression=sketch", wingbeat.DeAR(plan="merged", compression="sketch")),
        ("dear:plan=merged@paper", wingbeat.DeAR(plan="merged@paper")),
    ],
)
def test_a_composition_is_spelled_with_its_parts_names(text: str, meant: object) -> None:
    assert parse(text) == meant


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stratgy", "(did you mean 'strategy'?)"),
        ("strategy:plans=bo", "(did you mean 'plan'?)"),
        ("strategy:plan=bos", "unknown plan 'bos'"),
        ("strategy:update=sharded", "Sharded() needs all-reduces in two halves"),
        ("dear:plan=merged@paper,mb=3", "mb is an option for a plan by its name alone"),
    ],
)
def test_what_cannot_be_composed_is_refused_in_one_line(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_presets_and_the_composition_have_a_name_each() -> None:
    assert names() == [*PRESETS, "strategy"]
