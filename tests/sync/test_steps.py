"""Workers that have made different numbers of steps are told how many."""

from __future__ import annotations

from typing import Any

import pytest

from wingbeat.errors import UsageError
from wingbeat.sync import steps
from wingbeat.sync.bucket import TURNS
from wingbeat.sync.steps import Steps
from wingbeat.transport import loopback


def _said(world: Any, count: int) -> str:
    counter = Steps(world)
    assert counter.count == 0
    counter.count = count
    with pytest.raises(UsageError) as caught:
        counter.disagree()
    return str(caught.value)


def test_every_worker_says_who_has_made_how_many() -> None:
    worlds = loopback.worlds(3)
    said = loopback.run(worlds, lambda world: _said(world, 7 + world.rank))
    assert len(set(said)) == 1
    assert "(rank 0 7, rank 1 8, rank 2 9)" in said[0]
    assert "\n" not in said[0]


def test_who_does_not_answer_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "PATIENCE", 0.01)
    first, *_ = loopback.worlds(3)
    assert "(rank 0 4)" in _said(first, 4)


def test_channels_count_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one model's workers have said is not taken for another's."""
    monkeypatch.setattr(steps, "PATIENCE", 0.01)
    worlds = loopback.worlds(2)
    first, _ = loopback.run(worlds, lambda world: world.open_channel())
    _said(worlds[1], 5)
    assert "(rank 0 4)" in _said(first, 4)


def test_one_step_more_or_less_always_shows() -> None:
    assert TURNS > 2


def test_nobody_waits_longer_than_the_world_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    for timeout in (2.0, 60.0):
        first, *_ = loopback.worlds(2, timeout=timeout)

        def get(_key: str, seconds: float) -> str:
            asked.append(seconds)
            return "1"

        monkeypatch.setattr(first.store, "get", get)
        _said(first, 4)
    assert asked == [2.0, steps.PATIENCE]
