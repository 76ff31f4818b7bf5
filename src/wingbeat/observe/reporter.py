"""A worker's thread that reports the worker's progress about once per second.

A report is a text under the worker's key of the rendezvous store and replaces the previous one.
Rank 0 reads all of them and forwards them to the supervisor that it has started.
"""

from __future__ import annotations

import itertools
import math
import os
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import psutil

from wingbeat.observe import meter
from wingbeat.observe.launch import Launched
from wingbeat.observe.log import log
from wingbeat.observe.meter import Cell, Meter, Section
from wingbeat.observe.report import READS, TEXT, Report
from wingbeat.transport.store import Store

EVERY_S = 1.0
"""Seconds between two reports."""

_AT_ONCE_S = 1.0
"""Timeout of reads of keys that exist, in seconds."""

_LEAVE_S = 1.0
"""Seconds that the last report may take."""


@dataclass(frozen=True)
class Place:
    """A worker's rank, the number of workers, its interfaces, and a connection for reports."""

    rank: int
    size: int
    interfaces: tuple[str, ...]
    store: Store


class Reporter:
    """Reports the meters of this process's models every ``every_s`` seconds.

    On rank 0 ``supervisor`` receives the reports of all workers; it is None on other ranks.
    """

    def __init__(
        self, place: Place, supervisor: Launched | None = None, every_s: float = EVERY_S
    ) -> None:
        self._place, self._supervisor, self._every_s = place, supervisor, every_s
        self._meters: weakref.WeakSet[Meter] = weakref.WeakSet()
        self._changing = threading.Lock()
        self._numbers = itertools.count()
        self._ending = threading.Event()
        self._pid = os.getpid()
        self._turn = 1
        self._seen: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="wingbeat-report", daemon=True)

    def add(self, each: Meter) -> None:
        """Include a model in the reports until its meter is garbage-collected."""
        with self._changing:
            self._meters.add(each)

    def start(self) -> Reporter:
        """Start the thread."""
        self._thread.start()
        return self

    def close(self) -> None:
        """Send the last report and stop; takes about 1 s at most."""
        if self._pid != os.getpid():  # a forked child does not have the parent's threads
            return
        self._ending.set()
        self._thread.join(_LEAVE_S)
        if self._supervisor is not None and self._thread.is_alive():
            self._supervisor.kill()  # the thread may be blocked on it
        elif self._supervisor is not None:
            self._supervisor.close()

    # -- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._ending.wait(self._every_s):
                self.step()
            self.step()
        except Exception as error:
            # Most often the store's host has exited. The supervisor notices missing reports, and
            # training is not affected.
            log.debug("rank %d reports no more: %s", self._place.rank, error)

    def step(self) -> None:
        """Write this worker's report; on rank 0 forward all workers' reports.

        Raises the store's exception if the store is lost.
        """
        place, mine = self._place, self._report().to_text()
        if place.size > 1 and place.rank:
            place.store.set(_key(place.rank), mine)
        elif self._supervisor is not None and self._supervisor.hand_on(mine):
            for rank in self._due():
                text = self._read(rank)
                if text is not None:
                    self._supervisor.hand_on(text)

    def _due(self) -> Iterable[int]:
        """Yield the ranks to read now, in turns, so that reading has a bounded cost."""
        others = self._place.size - 1
        for _ in range(min(others, READS)):
            yield self._turn
            self._turn = self._turn % others + 1

    def _read(self, rank: int) -> str | None:
        """Return a worker's report; None if it has not sent one."""
        store, key = self._place.store, _key(rank)
        if rank not in self._seen:
            # Waiting locks some stores, and their timeout of 0 s never expires.
            if not store.has(key):
                return None
            self._seen.add(rank)
        return store.get(key, _AT_ONCE_S)

    def _report(self) -> Report:
        with self._changing:
            meters = sorted(self._meters, key=lambda each: (each.name, -each.iterations))
        place = self._place
        sections = _added(section for each in meters for section in each.sections)
        if len(meters) > 1:
            steps = {f"{i} {each.name}": each.iterations for i, each in enumerate(meters)}
            sections.insert(0, Section("steps", dict(steps)))
        return Report(
            rank=place.rank,
            size=place.size,
            host=socket.gethostname(),
            pid=os.getpid(),
            strategy=_cut(", ".join(dict.fromkeys(each.strategy for each in meters))),
            number=next(self._numbers),
            at_s=time.monotonic(),
            iteration=max((each.iterations for each in meters), default=0),
            spent_s=_spent(meters),
            interfaces=_bytes(place.interfaces),
            counts=_counts(meters),
            sections=tuple(sections),
            ended=self._ending.is_set(),
        )


def _key(rank: int) -> str:
    return f"reports/{rank}"


def _cut(text: str) -> str:
    return text if len(text) <= TEXT else text[: TEXT - 3] + "..."


def _spent(meters: Sequence[Meter]) -> dict[str, float]:
    """Return the seconds of all models by part."""
    models = [each.spent for each in meters]
    busy = {
        part: math.fsum(spent[part] for spent in models)
        for part in ("forward", "backward", "update", "exchange")
    }
    # Time that is ``other`` for one model may be another model's forward.
    passed = max((math.fsum(spent.values()) for spent in models), default=0.0)
    other = max(0.0, passed - math.fsum(busy.values()))
    return {**busy, "other": other, "codec": meter.codec.total / 1e9}


def _added(sections: Iterable[Section]) -> list[Section]:
    """Add the numbers of all models' sections of one name and unit; the last text is kept."""
    found: dict[tuple[str, str], dict[str, Cell]] = {}
    for section in sections:
        cells = found.setdefault((section.name, section.unit), {})
        for column, cell in section.cells.items():
            before = cells.get(column, 0)
            if isinstance(cell, str) or isinstance(before, str):
                cells[column] = cell
            else:
                cells[column] = before + cell
    return [Section(name, cells, unit) for (name, unit), cells in found.items()]


def _counts(meters: Iterable[Meter]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for each in meters:
        counts.update(dict(each.counts))
    return dict(counts)


def _bytes(names: Iterable[str]) -> dict[str, tuple[int, int]]:
    counters: Callable[..., Mapping[str, object]] = psutil.net_io_counters
    try:
        found = counters(pernic=True, nowrap=False)
    except (OSError, RuntimeError):  # no /proc, or no permission
        return {}
    known = {name: found[name] for name in names if name in found}
    return {n: (getattr(c, "bytes_sent"), getattr(c, "bytes_recv")) for n, c in known.items()}  # noqa: B009
