from __future__ import annotations

from wingbeat.simulator.agenda import Agenda


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
