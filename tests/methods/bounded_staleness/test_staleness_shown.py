"""What is shown of a worker under bounded staleness."""

from __future__ import annotations

from typing import Any

from wingbeat.methods.bounded_staleness.messages import Entry, Here
from wingbeat.methods.bounded_staleness.pace import Pace
from wingbeat.methods.bounded_staleness.status import bits, shown
from wingbeat.methods.bounded_staleness.view import whole
from wingbeat.methods.bounded_staleness.worker import Worker

OTHERS = {"in_flight": 2, "waiting": 0, "pulled": 0}
PIECES = OTHERS | {"waiting": 4}  # rounds of which this worker has its own piece alone


def nothing(colayer: int, piece: int, waiting: dict[Entry, Any]) -> None:
    """No sums are made here."""


def test_how_far_a_worker_is_and_what_it_has_sent() -> None:
    machine = Worker(1, 3, Pace(2, 1, 3), nothing)
    machine.begin()
    machine.computed(0, [None] * 3)
    machine.receive(0, 0, Here(2, 1, 0, ended=False, zeta=2, view=whole(3)))
    staleness, exchanged = shown(machine, 3, 2)
    assert staleness.name == "staleness"
    assert staleness.cells == {"iteration": 0, "fastest": 2, "behind": 2, "dropped": 0} | OTHERS
    assert exchanged.name == "exchanged"
    assert exchanged.cells == {"row": 0, "c0": ".1.", "c1": "..."}
    assert staleness.unit == exchanged.unit == ""


def test_what_is_dropped_is_counted() -> None:
    machine = Worker(1, 2, Pace(2, 2, 3), nothing)
    machine.begin()
    machine.receive(0, 0, Here(4, 3, 0, ended=False, zeta=4, view=whole(2)))
    staleness, _ = shown(machine, 2, 3)
    assert staleness.cells == {"iteration": 4, "fastest": 4, "behind": 0, "dropped": 1} | PIECES


def test_without_a_bound_of_rounds_in_flight_it_is_s() -> None:
    staleness, _ = shown(Worker(1, 2, Pace(3, 2, 3, None), nothing), 2, 3)
    assert staleness.cells["in_flight"] == 3
    staleness, _ = shown(Worker(1, 2, Pace(None, 2, 3, None), nothing), 2, 3)
    assert staleness.cells["in_flight"] == "any"


def test_nobody_is_ahead_of_the_fastest() -> None:
    machine = Worker(1, 2, Pace(2, 2, 3), nothing)
    machine.begin()
    machine.finish()
    staleness, _ = shown(machine, 2, 3)
    assert staleness.cells == {"iteration": 1, "fastest": 1, "behind": 0, "dropped": 0} | OTHERS


def test_of_many_workers_their_number_is_shown() -> None:
    assert bits(0, 16) == "." * 16
    assert bits((1 << 17) - 1, 17) == "17/17"
