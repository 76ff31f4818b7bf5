"""Computes the state of a job from its workers' reports. Callers pass the time in."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from wingbeat.observe.meter import PARTS, Section
from wingbeat.observe.report import Malformed, Report
from wingbeat.observe.snapshot import MOST_WORKERS, Job, Worker

WINDOW_S = 10.0
"""Rates are averages over this number of seconds before a worker's last report."""


class Watch:
    """The last reports of one job's workers; ``refused`` counts texts that were not valid."""

    def __init__(self, name: str, now: float) -> None:
        self._name, self._began = name, now
        self._heard: dict[int, _Heard] = {}
        self._size = 0
        self.refused = 0

    def take(self, text: str, now: float) -> None:
        """Add a worker's report; count and drop anything else. A repeated report has no effect."""
        try:
            report = Report.from_text(text)
            if report.size > MOST_WORKERS or self._size not in (0, report.size):
                raise Malformed(f"a job of {report.size} workers, not {self._size}")
        except Malformed:
            self.refused += 1
            return
        self._size = report.size
        heard = self._heard.get(report.rank)
        if heard is None or not heard.continues(report):
            self._heard[report.rank] = _Heard(report, now)
        else:
            heard.add(report, now)

    def job(self, now: float, unix_s: float) -> Job:
        """Return the job's current state."""
        watched = max(0.0, now - self._began)
        workers = tuple(
            self._heard[rank].worker(now)
            if rank in self._heard
            else Worker(rank, silent_s=watched, still_s=watched)
            for rank in range(self._size)
        )
        return Job(self._name, watched, unix_s, workers)


class _Heard:
    """One worker's last reports."""

    def __init__(self, report: Report, now: float) -> None:
        self._reports = deque([report])
        self._at = self._stepped = now

    def continues(self, report: Report) -> bool:
        """Whether the report is from the same process and not older."""
        last = self._reports[-1]
        return report.pid == last.pid and report.number >= last.number

    def add(self, report: Report, now: float) -> None:
        last = self._reports[-1]
        if report.number == last.number:
            return
        if report.iteration != last.iteration:
            self._stepped = now
        self._at = now
        self._reports.append(report)
        while len(self._reports) > 2 and self._reports[1].at_s <= report.at_s - WINDOW_S:
            self._reports.popleft()

    def worker(self, now: float) -> Worker:
        first, last = self._reports[0], self._reports[-1]
        worker = Worker(
            last.rank,
            last,
            silent_s=max(0.0, now - self._at),
            still_s=max(0.0, now - self._stepped),
            sections=tuple(each for each in last.sections if not each.unit),
        )
        passed = last.at_s - first.at_s
        # The current rate of a silent worker is unknown.
        known = passed > 0 and not worker.silent
        return _with_rates(worker, first, last, passed) if known else worker


def _with_rates(worker: Worker, first: Report, last: Report, passed: float) -> Worker:
    steps = max(0, last.iteration - first.iteration)
    grown = {p: s - first.spent_s.get(p, 0.0) for p, s in last.spent_s.items() if p in PARTS}
    interfaces = {}
    for name, (sent, received) in last.interfaces.items():
        before = first.interfaces.get(name, (sent, received))
        interfaces[name] = _rate(sent - before[0], passed), _rate(received - before[1], passed)
    return replace(
        worker,
        rate=steps / passed,
        ms={part: 1e3 * max(0.0, s) / steps for part, s in grown.items()} if steps else {},
        interfaces=interfaces,
        sections=tuple(_grown(each, first, passed) for each in last.sections),
    )


def _grown(section: Section, first: Report, passed: float) -> Section:
    """Convert growing cells into rates per second."""
    if not section.unit:
        return section
    same = (
        each for each in first.sections if (each.name, each.unit) == (section.name, section.unit)
    )
    before = next((each.cells for each in same), {})
    cells = {
        # A new cell has grown from 0.
        name: _rate(float(cell) - float(before.get(name, 0)), passed)
        for name, cell in section.cells.items()
    }
    return replace(section, cells=dict(cells))


def _rate(grown: float, passed: float) -> float:
    return max(0.0, grown) / passed
