"""Totals of one model's training, which training threads add to and other threads read.

They are always recorded. Each addition costs two reads of the clock. `observe.events` records
what happened when.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from wingbeat.schema import Length, MalformedMessage, Text

TEXT, CELLS = 128, 256
"""Limits of a report: characters of a text, and cells of a section."""

Cell: TypeAlias = int | float | Annotated[str, Text(TEXT)]

GROWS = ("B/s", "/s")
"""Units of sections whose cells only grow; they are shown as rates per second."""


@dataclass(frozen=True, slots=True)
class Section:
    """Values that a strategy shows for one worker: a row of a table of all workers.

    Attributes:
        name: the table's name, such as ``classes``.
        cells: values by column.
        unit: empty if values are shown as they are; otherwise one of `GROWS`.
    """

    name: Annotated[str, Text(TEXT)]
    cells: Annotated[dict[Annotated[str, Text(TEXT)], Cell], Length(most=CELLS)]
    unit: str = ""

    def __post_init__(self) -> None:
        """Raise MalformedMessage if the unit is unknown."""
        if self.unit not in ("", *GROWS):
            raise MalformedMessage(f"unit is {self.unit!r:.40}; allowed: {', '.join(GROWS)}")


class Tally:
    """Nanoseconds that several threads add to without a lock.

    ``sources`` return those that are counted elsewhere.

    >>> spent = Tally()
    >>> spent.add(5)
    >>> spent.add(7)
    >>> spent.total
    12
    """

    __slots__ = ("_by_thread", "sources")

    def __init__(self) -> None:
        self._by_thread: dict[int, int] = {}
        self.sources: list[Callable[[], int]] = []

    def add(self, ns: int) -> None:
        """Add ``ns``."""
        # `x += 1` on one number is not atomic, so each thread has a number of its own.
        me, mine = threading.get_ident(), self._by_thread
        mine[me] = mine.get(me, 0) + ns

    @property
    def total(self) -> int:
        """The sum over all threads."""
        counted = sum(source() for source in self.sources)
        return sum(list(self._by_thread.values())) + counted


codec = Tally()
"""Nanoseconds that all threads of this process have spent encoding and decoding."""


class Meter:
    """Totals of one model on one worker.

    The training thread is always in one phase. Time blocked on the exchange counts as exchange, not
    as the phase.

    Attributes:
        name, strategy: the model's name, and the strategy as written by the user.
        iterations: optimizer steps so far.
        counts: number of rare events by name.
        waited_ns: nanoseconds in which the training thread was blocked on the exchange.
        compare: returns what is known of an iteration with DDP's schedule, as a phrase; or nothing.
            Another thread calls it, as `show`'s sources.
    """

    __slots__ = (
        *("__weakref__", "_at", "_clock", "_phase", "_sources", "_spent", "_waited"),
        *("compare", "counts", "iterations", "name", "strategy", "waited_ns"),
    )

    def __init__(
        self, name: str, strategy: str = "", clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.name, self.strategy = name, strategy
        self.iterations = 0
        self.waited_ns = 0
        self.compare: Callable[[], str] = str
        self.counts: dict[str, int] = {}
        self._clock = clock
        self._phase = "other"
        self._at, self._waited = clock(), 0
        self._spent = {"forward": 0, "backward": 0, "update": 0, "other": 0}
        self._sources: list[Callable[[], Sequence[Section]]] = []

    def enter(self, phase: str) -> None:
        """Begin ``forward``, ``backward``, ``update`` or ``other``, which ends the phase before."""
        now, waited = self._clock(), self.waited_ns
        self._spent[self._phase] += now - self._at - (waited - self._waited)
        self._phase, self._at, self._waited = phase, now, waited

    def stepped(self) -> None:
        """End an iteration."""
        self.enter("other")
        self.iterations += 1

    def count(self, what: str, times: int = 1) -> None:
        """Count a rare event, such as dropped gradients."""
        self.counts[what] = self.counts.get(what, 0) + times

    def show(self, source: Callable[[], Sequence[Section]]) -> None:
        """Show the sections that ``source()`` returns.

        Another thread calls it about once per second; it must not block or take a lock.
        """
        self._sources.append(source)

    @property
    def spent(self) -> dict[str, float]:
        """Seconds so far by part, see `report.Report`, without codec; any thread may call it."""
        spent = {phase: ns / 1e9 for phase, ns in self._spent.items()}
        return {**spent, "exchange": self.waited_ns / 1e9}

    @property
    def sections(self) -> list[Section]:
        """Current sections of the strategy; any thread may call it."""
        return [section for source in self._sources for section in source()]
