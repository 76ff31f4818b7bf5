"""Workers that decide on other colayers in one place, whoever comes or goes meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from helpers.stale import Store
from wingbeat.errors import PeerError
from wingbeat.methods.bounded_staleness.rebundling import Rebundling
from wingbeat.methods.bounded_staleness.view import View, whole

NEW, TWO = ((2, 1), (0,)), whole(2)


@dataclass
class Machine:
    view: View = TWO
    agreeing: bool = False
    applied: int = 9


class Clock:
    """Every look is a second after the one before."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def both(choose: Any = lambda told: NEW) -> tuple[Store, Rebundling, Rebundling]:
    store = Store()
    one, other = (
        Rebundling(store, "room", rank, 3, choose, first=6, again=50, clock=Clock())
        for rank in range(2)
    )
    return store, one, other


def test_it_is_decided_when_all_have_said_what_they_have() -> None:
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
        (Machine(agreeing=True), ()),
        (Machine(), {1}),
    ],
)
def test_who_comes_or_goes_meanwhile_has_it_tried_again(machine: Machine, gone: set[int]) -> None:
    _, one, other = both()
    assert one.decide(Machine(), (), None) is None
    found = one.decide(machine, gone, None)
    assert found is not None
    assert (found.buckets, found.why) == (None, "a worker came or went")
    assert not one.is_due(58)
    assert one.is_due(59)
    # The other had not settled, and follows.
    assert other.over()
    assert other.decision == found
    assert other.due == 59


def test_the_first_decision_counts_also_if_its_worker_dies() -> None:
    _, one, other = both()
    one.decide(Machine(), (), None)
    found = other.decide(Machine(), (), None)
    assert one.decide(Machine(), {1}, None) == found


def test_workers_that_say_different_things_of_who_is_there_go_on_as_before() -> None:
    for different in (Machine(view=View((0, 2))), Machine(applied=10)):
        _, one, other = both()
        one.decide(Machine(), (), None)
        found = other.decide(different, (), None)
        assert found is not None
        assert found.buckets is None


def test_it_is_not_tried_again_when_a_worker_has_ended() -> None:
    _, one, other = both()
    other.ended()
    found = one.decide(Machine(), (), None)
    assert found is not None
    assert (found.why, one.due) == ("a worker has ended its training", None)


def test_it_is_tried_again_where_nobody_has_measured() -> None:
    _, one, other = both(lambda told: None)
    one.decide(Machine(), (), None)
    found = other.decide(Machine(), (), None)
    assert found is not None
    assert (found.why, other.due) == ("nothing was measured", 59)


def test_who_comes_back_reads_what_was_decided() -> None:
    store, one, other = both()
    one.decide(Machine(), (), None)
    one.decide(Machine(), {1}, None)
    late = Rebundling(store, "room", 1, 3, lambda _: NEW, first=6, again=50)
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
def test_what_is_no_decision_is_refused(text: str) -> None:
    store, one, _ = both()
    store.set("room/0/decided", text)
    with pytest.raises(PeerError, match="is no decision about 3 tensors"):
        one.catch_up()


def test_a_store_that_is_gone_is_named() -> None:
    class Gone(Store):
        def claim(self, key: str, value: str) -> str:
            raise TimeoutError("no answer")

    one = Rebundling(Gone(), "room", 0, 3, lambda _: NEW, clock=Clock())
    one.decide(Machine(), (), None)
    with pytest.raises(PeerError, match=r"rank 0: cannot have it decided.*no answer"):
        one.decide(Machine(), {1}, None)
