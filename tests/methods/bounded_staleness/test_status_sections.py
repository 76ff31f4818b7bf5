"""The status of a worker that `wingbeat top` shows."""

from __future__ import annotations

from typing import Any

from wingbeat.methods.bounded_staleness.bound import StalenessBound
from wingbeat.methods.bounded_staleness.exchange import format_mask, status_sections
from wingbeat.methods.bounded_staleness.messages import Contribution, Progress
from wingbeat.methods.bounded_staleness.worker import Worker
from wingbeat.transport.membership import initial_view

OTHERS = {"in_flight": 2, "waiting": 0, "pulled": 0}
PIECES = OTHERS | {"waiting": 4}  # rounds of which only its own piece has arrived


def combine(colayer: int, piece: int, waiting: dict[Contribution, Any]) -> None:
    """Make no sums."""


def test_sections_show_progress_and_sent_colayers() -> None:
    machine = Worker(1, 3, StalenessBound(2, 1, 3), combine)
    machine.begin_iteration()
    machine.send_colayer(0, [None] * 3)
    machine.receive(0, 0, Progress(2, 1, 0, finished=False, zeta=2, view=initial_view(3)))
    staleness, exchanged = status_sections(machine, 3, 2)
    assert staleness.name == "staleness"
    assert staleness.cells == {"iteration": 0, "fastest": 2, "behind": 2, "dropped": 0} | OTHERS
    assert exchanged.name == "exchanged"
    assert exchanged.cells == {"row": 0, "c0": ".1.", "c1": "..."}
    assert staleness.unit == exchanged.unit == ""


def test_sections_count_dropped_iterations() -> None:
    machine = Worker(1, 2, StalenessBound(2, 2, 3), combine)
    machine.begin_iteration()
    machine.receive(0, 0, Progress(4, 3, 0, finished=False, zeta=4, view=initial_view(2)))
    staleness, _ = status_sections(machine, 2, 3)
    assert staleness.cells == {"iteration": 4, "fastest": 4, "behind": 0, "dropped": 1} | PIECES


def test_sections_show_in_flight_bound() -> None:
    staleness, _ = status_sections(Worker(1, 2, StalenessBound(3, 2, 3, None), combine), 2, 3)
    assert staleness.cells["in_flight"] == 3
    staleness, _ = status_sections(Worker(1, 2, StalenessBound(None, 2, 3, None), combine), 2, 3)
    assert staleness.cells["in_flight"] == "any"


def test_sections_between_iterations_show_no_lag() -> None:
    machine = Worker(1, 2, StalenessBound(2, 2, 3), combine)
    machine.begin_iteration()
    machine.end_iteration()
    staleness, _ = status_sections(machine, 2, 3)
    assert staleness.cells == {"iteration": 1, "fastest": 1, "behind": 0, "dropped": 0} | OTHERS


def test_format_mask_of_many_workers_shows_count() -> None:
    assert format_mask(0, 16) == "." * 16
    assert format_mask((1 << 17) - 1, 17) == "17/17"
