"""What one model's training has taken so far: totals that its own threads add to and others read.

Always on, so a place that adds costs two looks at the clock and an addition. Nothing is kept but
the totals; what happened when is the event stream's (`observe.events`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Cell: TypeAlias = "int | float | str"

PARTS = ("forward", "backward", "update", "exchange", "other", "codec")
"""What an iteration's time goes into. ``codec`` is work of all threads, beside the others in part;
the others are the training thread's, and add up to its time."""

GROWS = ("B/s", "/s")
"""Units of sections whose cells only grow: what is shown is by how much in a second."""


@dataclass(frozen=True, slots=True)
class Section:
    """Something that a strategy wants to be seen of one worker: a row of a table of all workers.

    Attributes:
        name: the table's, as ``classes``.
        cells: by column.
        unit: empty for what is shown as it is; or one of `GROWS`.
    """

    name: str
    cells: dict[str, Cell]
    unit: str = ""


class Tally:
    """Nanoseconds that several threads add to at once, without a lock.

    >>> spent = Tally()
    >>> spent.add(5)
    >>> spent.add(7)
    >>> spent.total
    12
    """

    __slots__ = ("_by_thread",)

    def __init__(self) -> None:
        self._by_thread: dict[int, int] = {}

    def add(self, ns: int) -> None:
        """Add ``ns``."""
        # `x += 1` of one number by two threads loses some; each thread has a number of its own.
        me, mine = threading.get_ident(), self._by_thread
        mine[me] = mine.get(me, 0) + ns

    @property
    def total(self) -> int:
        """All that was added, by whatever thread."""
        return sum(list(self._by_thread.values()))


codec = Tally()
"""Nanoseconds that threads of this process have encoded and decoded, for whatever model."""


class Meter:
    """Totals of one model on one worker.

    The training thread is always in one phase. What it waits for the exchange, in whatever phase,
    is counted there and not in the phase.

    Args:
        name: the model's.
        strategy: as its user has written it.
        clock: returns nanoseconds that never go back.

    Attributes:
        iterations: optimizer steps so far.
        counts: how often things happened that should be rare, by their name.
        waited_ns: nanoseconds in which the training thread was blocked on the exchange.
    """

    __slots__ = (
        "__weakref__",
        "_at",
        "_clock",
        "_phase",
        "_sources",
        "_spent",
        "_waited",
        "counts",
        "iterations",
        "name",
        "strategy",
        "waited_ns",
    )

    def __init__(
        self, name: str, strategy: str = "", clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.name, self.strategy = name, strategy
        self.iterations = 0
        self.waited_ns = 0
        self.counts: dict[str, int] = {}
        self._clock = clock
        self._phase = "other"
        self._at, self._waited = clock(), 0
        self._spent = {"forward": 0, "backward": 0, "update": 0, "other": 0}
        self._sources: list[Callable[[], Sequence[Section]]] = []

    def enter(self, phase: str) -> None:
        """Begin ``forward``, ``backward``, ``update`` or ``other``, which ends what was before."""
        now, waited = self._clock(), self.waited_ns
        self._spent[self._phase] += now - self._at - (waited - self._waited)
        self._phase, self._at, self._waited = phase, now, waited

    def stepped(self) -> None:
        """End an iteration."""
        self.enter("other")
        self.iterations += 1

    def count(self, what: str, times: int = 1) -> None:
        """Count something that should be rare, as gradients that a rule has dropped."""
        self.counts[what] = self.counts.get(what, 0) + times

    def show(self, source: Callable[[], Sequence[Section]]) -> None:
        """Have what ``source()`` returns be shown.

        Another thread calls it, about once a second: it must not wait, nor take a lock.
        """
        self._sources.append(source)

    @property
    def spent(self) -> dict[str, float]:
        """Seconds in each of `PARTS` but the codec, until now; any thread may ask."""
        spent = {phase: ns / 1e9 for phase, ns in self._spent.items()}
        return {**spent, "exchange": self.waited_ns / 1e9}

    @property
    def sections(self) -> list[Section]:
        """What the strategy shows of itself now; any thread may ask."""
        return [section for source in self._sources for section in source()]
