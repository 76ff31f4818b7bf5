"""The roll: who takes part, decided in one place, so that a network in two halves has one of them.

It is a list of views that only grows; each names who wrote it, and whoever writes the next entry
first is right. A worker writes one when it misses others: it waits until everyone else has given a
sign since, or is missed as well, so the entry names its whole other half. Whoever comes second
finds itself in it, and ends. What the list is kept in (the rendezvous store) is not known here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import NamedTuple

from wingbeat.methods.bounded_staleness.letters import MOST, Malformed
from wingbeat.methods.bounded_staleness.view import View, merge, whole


class Change(NamedTuple):
    """What an entry has changed for one worker.

    Attributes:
        worker: whose.
        life: which of its lives is over, or has begun.
        begun: whether it has begun.
        by: who says so.
    """

    worker: int
    life: int
    begun: bool
    by: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the roll."""

    by: int
    view: View

    def to_text(self) -> str:
        """Write it down as JSON."""
        return json.dumps({"by": self.by, "view": self.view})

    @classmethod
    def of(cls, text: str, workers: int) -> Entry:
        """Read what `to_text` has written.

        Raises:
            Malformed: it is something else.
        """
        try:
            words = json.loads(text)
            by, view = words["by"], words["view"]
            whole_numbers = all(type(number) is int and 0 <= number < MOST for number in view)
            fine = type(by) is int and 0 <= by < workers
        except (ValueError, KeyError, TypeError, RecursionError):
            fine = whole_numbers = False
        if not fine or not whole_numbers or len(view) != workers:
            raise Malformed(f"{text!r:.60} is no entry of the roll")
        return cls(by, View(tuple(view)))


class Roll:
    """The entries that have been read.

    Args:
        workers: how many there may be.

    Attributes:
        view: who takes part, by all of them.
        entries: how many they are.
    """

    def __init__(self, workers: int) -> None:
        self.view = whole(workers)
        self.entries = 0

    def read(self, text: str) -> list[Change]:
        """Read the next entry; return what has changed, ends before beginnings.

        Raises:
            Malformed: it is none.
        """
        entry = Entry.of(text, len(self.view))
        before, self.view = self.view, merge(self.view, entry.view)
        self.entries += 1
        changed = [w for w, number in enumerate(before) if self.view[w] != number]
        ends = [Change(w, before[w] // 2, False, entry.by) for w in changed if before[w] % 2 == 0]
        begins = [
            Change(w, self.view[w] // 2, True, entry.by) for w in changed if self.view[w] % 2 == 0
        ]
        return ends + begins

    def wants(self, view: View) -> bool:
        """Whether ``view`` says more than the roll does."""
        return merge(self.view, view) != self.view
