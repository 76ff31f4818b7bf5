from __future__ import annotations

import pytest

from wingbeat.simulator.agenda import Agenda, Cores


def test_everything_is_done_in_the_order_of_time_and_then_of_entry() -> None:
    agenda = Agenda()
    done: list[tuple[float, str]] = []

    def note(name: str) -> None:
        done.append((agenda.now, name))

    def again() -> None:
        note("first")
        agenda.at(1.0, lambda: note("entered at this moment"))
        agenda.at(3.0, lambda: note("last"))

    agenda.at(2.0, lambda: note("late"))
    agenda.at(1.0, again)
    agenda.at(1.0, lambda: note("second"))
    agenda.run()
    assert done == [
        (1.0, "first"),
        (1.0, "second"),
        (1.0, "entered at this moment"),
        (2.0, "late"),
        (3.0, "last"),
    ]


@pytest.mark.parametrize(
    ("count", "ends"),
    [(None, [1.0, 2.0, 3.0]), (3, [1.0, 2.0, 3.0]), (2, [1.0, 2.0, 4.0]), (1, [1.0, 3.0, 6.0])],
)
def test_work_waits_for_a_processor_in_turn(count: int | None, ends: list[float]) -> None:
    agenda, over = Agenda(), list[float]()
    cores = Cores(agenda, count)
    for seconds in (1.0, 2.0, 3.0):
        cores.work(seconds, lambda: over.append(agenda.now))
    agenda.run()
    assert over == ends


def test_a_processor_is_free_again() -> None:
    agenda, over = Agenda(), list[float]()
    cores = Cores(agenda, 1)
    cores.work(1.0, lambda: cores.work(1.0, lambda: over.append(agenda.now)))
    agenda.at(5.0, lambda: cores.work(1.0, lambda: over.append(agenda.now)))
    agenda.run()
    assert over == [2.0, 6.0]


def test_time_passes_at_once_where_nothing_is_due_before() -> None:
    agenda, seen = Agenda(), list[tuple[bool, float]]()

    def skip(when: float) -> None:
        seen.append((agenda.skip(when), agenda.now))

    agenda.at(1.0, lambda: skip(2.0))
    agenda.at(3.0, lambda: skip(4.0))
    agenda.at(4.0, agenda.stop)
    agenda.run()
    # What is due at the same moment was entered earlier, and comes first.
    assert seen == [(True, 2.0), (False, 3.0)]
    assert not agenda.skip(9.0), "it has stopped"


@pytest.mark.parametrize("count", [None, 1])
def test_spent_time_is_over_at_once_unless_something_is_due(count: int | None) -> None:
    agenda, over = Agenda(), list[float]()
    cores = Cores(agenda, count)

    def spend() -> None:
        while cores.spend(1.0, spend):
            over.append(agenda.now)

    agenda.at(0.0, spend)
    agenda.at(2.5, agenda.stop)
    agenda.run()
    assert over == [1.0, 2.0]


def test_spent_time_waits_for_a_processor() -> None:
    agenda, over = Agenda(), list[float]()
    cores = Cores(agenda, 1)
    cores.work(2.0, lambda: over.append(agenda.now))
    assert not cores.spend(1.0, lambda: over.append(agenda.now))
    agenda.run()
    assert over == [2.0, 3.0]
