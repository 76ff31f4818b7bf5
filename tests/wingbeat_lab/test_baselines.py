"""The presets that exist to be compared with are spelled as the others are, and known only here."""

from __future__ import annotations

import pytest

import wingbeat_lab
from wingbeat import strategies
from wingbeat.errors import UsageError
from wingbeat_lab import baselines


def test_the_table_of_presets_has_those_of_wingbeat_and_the_baselines() -> None:
    own = {name.lower() for name in wingbeat_lab.__all__}
    assert own.isdisjoint(strategies.PRESETS)
    assert set(baselines.PRESETS) == own | set(strategies.PRESETS)
    assert baselines.names() == [*baselines.PRESETS, "strategy"]


@pytest.mark.parametrize("name", wingbeat_lab.__all__)
def test_a_baseline_is_parsed_by_its_name(name: str) -> None:
    made = baselines.parse(f"{name.lower()}:compression=bf16")
    assert made == getattr(wingbeat_lab, name)(compression="bf16")


def test_a_preset_of_wingbeat_is_parsed_too() -> None:
    assert baselines.parse("dear:mb=3") == strategies.parse("dear:mb=3")


@pytest.mark.parametrize("name", wingbeat_lab.__all__)
def test_wingbeat_alone_does_not_know_a_baseline(name: str) -> None:
    with pytest.raises(UsageError, match=f"unknown strategy '{name.lower()}'"):
        strategies.parse(name.lower())


def test_an_unknown_name_is_refused_with_the_nearest_of_both() -> None:
    with pytest.raises(UsageError, match="did you mean 'tictac'"):
        baselines.parse("tictak")
