"""Decisions on colayers, with view changes meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from helpers.staleness_simulation import Store
from wingbeat.errors import PeerError
from wingbeat.methods.bounded_staleness.colayers import ColayerChange
from wingbeat.transport.membership import View, initial_view

NEW, TWO = ((2, 1), (0,)), initial_view(2)


@dataclass
class Machine:
    view: View = TWO
    view_changing: bool = False
    applied: int = 9


class Clock:
    """Each call is a second after the one before."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def both(choose: Any = lambda told: NEW) -> tuple[Store, ColayerChange, ColayerChange]:
    store = Store()
    one, other = (
        ColayerChange(store, "room", rank, 3, choose, first=6, retry_after=50, clock=Clock())
        for rank in range(2)
    )
    return store, one, other


def test_decision_with_all_measurements_changes_colayers() -> None:
    told: list[Sequence[Any]] = []

    def choose(of_all: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
        told.append(of_all)
        return NEW

    _, one, other = both(choose)
    assert one.is_due(6)
    assert not one.is_due(5)
    assert one.decide(Machine(), (), "mine") is None
    assert one.missing() == [1]
    found = other.decide(Machine(), (), "theirs")
    assert found is not None
    assert (found.buckets, found.rounds, found.view) == (NEW, 9, (0, 0))
    assert one.decide(Machine(), (), "mine") == found
    assert told == [["mine", "theirs"]]
    assert one.due is other.due is None


@pytest.mark.parametrize(
    ("machine", "gone"),
    [
        (Machine(view=View((0, 1))), ()),
        (Machine(view=View((0, 2))), ()),
        (Machine(view_changing=True), ()),
        (Machine(), {1}),
    ],
)
def test_decision_during_view_change_is_retried(machine: Machine, gone: set[int]) -> None:
    _, one, other = both()
    assert one.decide(Machine(), (), None) is None
    found = one.decide(machine, gone, None)
    assert found is not None
    assert (found.buckets, found.reason) == (None, "a worker came or went")
    assert not one.is_due(58)
    assert one.is_due(59)
    # The other worker had not drained, and follows.
    assert other.poll_decision()
    assert other.decision == found
    assert other.due == 59


def test_first_decision_wins_if_its_worker_dies() -> None:
    _, one, other = both()
    one.decide(Machine(), (), None)
    found = other.decide(Machine(), (), None)
    assert one.decide(Machine(), {1}, None) == found


def test_decision_with_different_views_keeps_colayers() -> None:
    for different in (Machine(view=View((0, 2))), Machine(applied=10)):
        _, one, other = both()
        one.decide(Machine(), (), None)
        found = other.decide(different, (), None)
        assert found is not None
        assert found.buckets is None


def test_decision_after_worker_finished_is_not_retried() -> None:
    _, one, other = both()
    other.mark_finished()
    found = one.decide(Machine(), (), None)
    assert found is not None
    assert (found.reason, one.due) == ("a worker has ended its training", None)


def test_decision_without_measurements_is_retried() -> None:
    _, one, other = both(lambda told: None)
    one.decide(Machine(), (), None)
    found = other.decide(Machine(), (), None)
    assert found is not None
    assert (found.reason, other.due) == ("nothing was measured", 59)


def test_restarted_worker_reads_all_decisions() -> None:
    store, one, other = both()
    one.decide(Machine(), (), None)
    one.decide(Machine(), {1}, None)
    late = ColayerChange(store, "room", 1, 3, lambda _: NEW, first=6, retry_after=50)
    late.catch_up()
    assert late.due == 59
    other.catch_up()
    one.decide(Machine(applied=70), (), None)
    other.decide(Machine(applied=70), (), None)
    late.catch_up()
    assert late.decision is not None
    assert late.decision.buckets == NEW


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[1, [0, 0], [[0, 1]], \"\", false]", "[1, [0, 0], [[0, 1, 2], []], \"\", false]",
     "[1, [0, 0], null, \"\", 7]", "[null, [0, 0], null, \"\", true]", "[1, 0, null, \"\", true]"],
)  # fmt: skip
def test_malformed_decision_is_rejected(text: str) -> None:
    store, one, _ = both()
    store.set("room/0/decided", text)
    with pytest.raises(PeerError, match="is not a decision about 3 tensors"):
        one.catch_up()


def test_unreachable_store_raises_peer_error() -> None:
    class Gone(Store):
        def claim(self, key: str, value: str) -> str:
            raise TimeoutError("no answer")

    one = ColayerChange(Gone(), "room", 0, 3, lambda _: NEW, clock=Clock())
    one.decide(Machine(), (), None)
    with pytest.raises(
        PeerError, match=r"rank 0: cannot reach the rendezvous store to decide.*no answer"
    ):
        one.decide(Machine(), {1}, None)
