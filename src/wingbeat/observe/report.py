"""Reports of workers, and the state of a job that follows from them.

A report is a line of JSON. It may come from another host, so every value is checked when it is
read: by the supervisor, and again, as part of a `Job`, by ``wingbeat top``.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, TypeAlias

from wingbeat.observe.meter import CELLS, TEXT, Section
from wingbeat.schema import Length, MalformedMessage, Range, Text, parse_json

LARGEST = 16 << 10
"""Maximum characters of a report. Sections beyond are left out."""

MANY = 32
"""Maximum interfaces, counts or sections of a report."""

READS = 32
"""Maximum reports that rank 0 forwards per second; with more workers each is read less often."""

MOST_WORKERS = 4096

SILENT_S = 5.0
"""Seconds without a report after which a worker is silent; more in large jobs."""

_HISTORY = 32
"""Maximum reports of a worker that rates are computed from. In `WINDOW_S` there are about 12."""

STILL_S = 10.0
"""Seconds without a step after which the state reports it."""

_MOST_RATE = 1e14
"""Maximum of a rate or a duration, below the limit of numbers in JSON."""

WINDOW_S = 10.0
"""Rates are averages over this number of seconds before a worker's last report."""

Whole: TypeAlias = Annotated[int, Range(0, 1 << 63)]
Real: TypeAlias = Annotated[float, Range(0, 1 << 63)]
Seconds: TypeAlias = Annotated[float, Range(0, 1 << 63, "s")]
Name: TypeAlias = Annotated[str, Text(TEXT)]
Spent: TypeAlias = Annotated[dict[Name, Real], Length(most=MANY)]
Counts: TypeAlias = Annotated[dict[Name, Whole], Length(most=MANY)]
Sections: TypeAlias = Annotated[tuple[Section, ...], Length(most=MANY)]

# -- one worker's report --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Report:
    """The state of one worker at one moment. All numbers are totals since its start.

    Attributes:
        rank: of the worker.
        size: number of workers.
        host: name of the host.
        pid: of the process.
        strategy: the text of all models' strategies.
        number: of the report, from 0.
        at_s: the worker's own clock.
        iteration: the maximum over the models.
        spent_s: by part: forward, backward, update, exchange and other are the training thread's
            and add up to its time; codec is work of all threads and may overlap with the others.
        interfaces: the host's bytes sent and received, from the kernel's counters.
        counts: of rare events.
        sections: what strategies show.
        ended: whether this is the last report.
    """

    rank: Whole
    size: Whole
    host: Name
    pid: Whole
    strategy: Name
    number: Whole
    at_s: Seconds
    iteration: Whole
    spent_s: Spent = field(default_factory=dict)
    interfaces: Annotated[dict[Name, tuple[Whole, Whole]], Length(most=MANY)] = field(
        default_factory=dict
    )
    counts: Counts = field(default_factory=dict)
    sections: Sections = ()
    ended: bool = False

    def __post_init__(self) -> None:
        """Raise MalformedMessage for a rank outside the job, or a cell that is no counter."""
        if self.rank >= self.size:
            raise MalformedMessage(f"rank {self.rank} of {self.size}")
        grown = (cell for each in self.sections if each.unit for cell in each.cells.values())
        if any(type(cell) is not int or cell < 0 for cell in grown):
            raise MalformedMessage("a section with a unit has a cell that is no counter")

    def to_text(self) -> str:
        """Return one line of JSON of at most `LARGEST` characters; sections beyond are left out."""
        data = asdict(self)
        fit = [section for section in data["sections"] if len(section["cells"]) <= CELLS]
        data["sections"] = fit[:MANY]
        while len(text := json.dumps(data, separators=(",", ":"))) > LARGEST and data["sections"]:
            data["sections"] = data["sections"][:-1]
        return text

    @staticmethod
    def from_text(text: str) -> Report:
        """Parse the output of `to_text`; raises MalformedMessage if it is not valid."""
        if len(text) > LARGEST:
            raise MalformedMessage(f"{len(text)} characters; allowed are {LARGEST}")
        return parse_json(Report, text)


# -- the state of a job ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Worker:
    """The known state of one worker. Rates are recent ones, per second.

    Attributes:
        rank: of the worker.
        report: the last one.
        silent_s: since the last report, or since monitoring began.
        still_s: since the last known step.
        rate: iterations per second; None if unknown.
        ms: milliseconds per iteration, by part; empty if unknown.
        interfaces: bytes sent and received per second.
        sections: of the last report; cells that grow are rates.
    """

    rank: Whole
    report: Report | None = None
    silent_s: Seconds = 0.0
    still_s: Seconds = 0.0
    rate: Real | None = None
    ms: Spent = field(default_factory=dict)
    interfaces: Annotated[dict[Name, tuple[Real, Real]], Length(most=MANY)] = field(
        default_factory=dict
    )
    sections: Sections = ()

    @property
    def _turn_s(self) -> float:
        """Additional delay of a report in seconds, because workers are read in turns."""
        return 0.0 if self.report is None else (self.report.size - 1) // READS

    @property
    def silent(self) -> bool:
        """Whether a report is overdue."""
        return self.silent_s > SILENT_S + self._turn_s

    @property
    def state(self) -> str:
        """The worker's state in a few words."""
        if self.report is None:
            return f"no report for {self.silent_s:.0f} s"
        if self.report.ended:
            return "ended"
        if self.silent:
            return f"silent for {self.silent_s:.0f} s"
        if self.still_s > max(STILL_S + self._turn_s, 5 / self.rate if self.rate else 0.0):
            return f"no step for {self.still_s:.0f} s"
        return "running"


@dataclass(frozen=True, slots=True)
class Job:
    """A job at one moment.

    Attributes:
        name: of the job.
        watched_s: since monitoring began.
        unix_s: the supervisor's clock.
        workers: by rank.
    """

    name: Name
    watched_s: Seconds
    unix_s: Seconds
    workers: Annotated[tuple[Worker, ...], Length(most=MOST_WORKERS)]

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        data = asdict(self)
        for listed, worker in zip(data["workers"], self.workers, strict=True):
            listed["state"] = worker.state
        return data

    @staticmethod
    def from_text(text: str | bytes) -> Job:
        """Parse the JSON of `to_json`; raises MalformedMessage if it is not valid."""
        return parse_json(Job, text)


class Watch:
    """Computes the state of a job from its workers' reports. Callers pass the time in."""

    def __init__(self, name: str, now: float) -> None:
        self._name, self._began = name, now
        self._histories: dict[int, _History] = {}
        self._size = 0

    def add_report(self, rank: int, text: str, now: float) -> str:
        """Add the text that a rank has sent; a repeated report has no effect.

        Returns why it is refused, in one line; empty if it is not.
        """
        try:
            report = Report.from_text(text)
            if report.rank != rank:
                raise MalformedMessage(f"rank is {report.rank}; allowed: {rank}")
            if report.size > MOST_WORKERS or self._size not in (0, report.size):
                allowed = self._size or f"up to {MOST_WORKERS}"
                raise MalformedMessage(f"size is {report.size}; allowed: {allowed}")
        except MalformedMessage as error:
            return str(error)
        self._size = report.size
        history = self._histories.get(rank)
        if history is None or not history.continues(report):
            self._histories[rank] = _History(report, now)
        else:
            history.add(report, now)
        return ""

    def job(self, now: float, unix_s: float) -> Job:
        """Return the job's current state."""
        watched = max(0.0, now - self._began)
        workers = tuple(
            self._histories[rank].worker(now)
            if rank in self._histories
            else Worker(rank, silent_s=watched, still_s=watched)
            for rank in range(self._size)
        )
        return Job(self._name, watched, unix_s, workers)


class _History:
    """The reports of one worker's process in the last `WINDOW_S` seconds."""

    def __init__(self, report: Report, now: float) -> None:
        self.reports = deque([report], _HISTORY)
        self._at = self._stepped = now

    def continues(self, report: Report) -> bool:
        """Whether the report is from the same process and not older."""
        last = self.reports[-1]
        return report.pid == last.pid and report.number >= last.number

    def add(self, report: Report, now: float) -> None:
        last = self.reports[-1]
        if report.number == last.number:
            return
        if report.iteration != last.iteration:
            self._stepped = now
        self._at = now
        self.reports.append(report)
        while len(self.reports) > 2 and self.reports[1].at_s <= report.at_s - WINDOW_S:
            self.reports.popleft()

    def worker(self, now: float) -> Worker:
        first, last = self.reports[0], self.reports[-1]
        worker = Worker(
            last.rank,
            last,
            silent_s=max(0.0, now - self._at),
            still_s=max(0.0, now - self._stepped),
            sections=tuple(each for each in last.sections if not each.unit),
        )
        # The current rate of a silent worker is unknown.
        known = last.at_s > first.at_s and not worker.silent
        return _with_rates(worker, first, last) if known else worker


def _with_rates(worker: Worker, first: Report, last: Report) -> Worker:
    passed, steps = last.at_s - first.at_s, max(0, last.iteration - first.iteration)

    def rate(now: float, before: float) -> float:
        return _bounded((now - before) / passed)

    def section_rates(section: Section) -> Section:
        if not section.unit:
            return section
        same = (each for each in first.sections if each.name == section.name)
        before = next((each.cells for each in same if each.unit == section.unit), {})
        # A new cell has grown from 0.
        cells = {n: rate(float(c), float(before.get(n, 0))) for n, c in section.cells.items()}
        return replace(section, cells=dict(cells))

    grown = {p: s - first.spent_s.get(p, 0.0) for p, s in last.spent_s.items()}
    return replace(
        worker,
        rate=_bounded(steps / passed),
        ms={part: _bounded(1e3 * s / steps) for part, s in grown.items()} if steps else {},
        interfaces={
            name: (rate(sent, before[0]), rate(received, before[1]))
            for name, (sent, received) in last.interfaces.items()
            for before in [first.interfaces.get(name, (sent, received))]
        },
        sections=tuple(map(section_rates, last.sections)),
    )


def _bounded(value: float) -> float:
    """Return a figure of a worker, whose clock may have any value, within the limits of a `Job`."""
    return min(max(0.0, value), _MOST_RATE)
