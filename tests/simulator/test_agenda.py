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
