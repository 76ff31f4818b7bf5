"""What training took, in lines of the log: from time to time, and at its end."""

from __future__ import annotations

from collections.abc import Callable

from wingbeat.observe.report import Report

EVERY_S = 600.0
"""Seconds of training between two lines."""

WARMUP = 10
"""Iterations at the start that do not count: connections, buckets and memory are new."""

FEWEST = 20
"""Iterations that a line needs."""

_LOOPBACK = "lo"
"""Its bytes stay on the host; what travels in shared memory is not among them."""

_TRAINING = ("forward", "backward", "update", "exchange", "other")
"""Parts of a training thread's time that add up to it."""


class Summary:
    """Follows the reports of one worker, and describes them in a line every ``every_s`` seconds."""

    def __init__(self, write: Callable[[str], None], every_s: float = EVERY_S) -> None:
        self._write, self._every_s = write, every_s
        self._first: Report | None = None
        self._since: Report | None = None
        self._last: Report | None = None
        self._comparison = ""

    def add(self, report: Report, comparison: str = "") -> None:
        """Take the next report; one without a model, whose totals have been freed, is ignored.

        ``comparison`` is what is known of an iteration with DDP's schedule, see `Meter.compare`.
        """
        if report.iteration < WARMUP or (self._last and report.iteration < self._last.iteration):
            return
        self._last, self._comparison = report, comparison
        if self._first is None or self._since is None:
            self._first = self._since = report
        elif report.at_s - self._since.at_s >= self._every_s:
            self._describe(self._since, report)
            self._since = report

    def end(self) -> None:
        """Write the line of the whole training."""
        if self._first is not None and self._last is not None:
            self._describe(self._first, self._last)

    def _describe(self, first: Report, last: Report) -> None:
        if last.iteration - first.iteration >= FEWEST:
            self._write(describe(first, last, self._comparison))


def describe(first: Report, last: Report, comparison: str = "") -> str:
    """Return what the iterations between two reports took, each on average.

    The bytes are those that the host's interfaces in use have sent, for all its processes; without
    them if only the loopback interface is in use.

    >>> spent = {"forward": 1.0, "backward": 2.0, "update": 0.5, "exchange": 0.5, "other": 0.0}
    >>> begin = Report(0, 2, "a", 1, "Ako()", 0, 10.0, 100, interfaces={"eth0": (0, 0)})
    >>> end = Report(0, 2, "a", 1, "Ako()", 4, 14.0, 140, spent, {"eth0": (80_000_000, 0)})
    >>> describe(begin, end)
    'Ako(): 40 steps, 100 ms each, 12% of it waiting for communication; host a sent 2 MB a step'
    """
    steps = last.iteration - first.iteration
    spent = {part: last.spent_s.get(part, 0.0) - first.spent_s.get(part, 0.0) for part in _TRAINING}
    whole = sum(spent.values())
    text = f"{last.strategy}: {steps:,} steps, {duration((last.at_s - first.at_s) / steps)} each"
    if whole > 0:
        text += f", {spent['exchange'] / whole:.0%} of it waiting for communication"
    names = (first.interfaces.keys() & last.interfaces.keys()) - {_LOOPBACK}
    sent = sum(last.interfaces[name][0] - first.interfaces[name][0] for name in names)
    if names:
        text += f"; host {last.host} sent {short(sent / steps / 1e6)} MB a step"
    return f"{text}; {comparison}" if comparison else text


def duration(seconds: float) -> str:
    """Return a time of an iteration in three digits, in ms or s.

    >>> duration(0.01234), duration(1.2345)
    ('12.3 ms', '1.23 s')
    """
    return f"{short(1e3 * seconds)} ms" if seconds < 1.0 else f"{short(seconds)} s"


def short(value: float) -> str:
    """Return a number in three digits, or all before the decimal point.

    >>> short(0.0204), short(87.06), short(1234.5)
    ('0.0204', '87.1', '1,234')
    """
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"
