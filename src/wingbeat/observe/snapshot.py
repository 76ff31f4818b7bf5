"""The state of a whole job at one moment, from which every view is made."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from wingbeat.observe.meter import Section
from wingbeat.observe.report import (
    MANY,
    READS,
    Malformed,
    Report,
    by_part,
    few,
    named,
    pair,
    parsed,
    seconds,
    section_of,
    text_of,
    whole,
)

SILENT_S = 5.0
"""Seconds without a report after which a worker is silent; more in large jobs."""

STILL_S = 10.0
"""Seconds without a step after which the state reports it."""

MOST_WORKERS = 4096


@dataclass(frozen=True, slots=True)
class Worker:
    """The known state of one worker. Rates are recent ones, per second.

    ``silent_s`` is the time since the last report, or since monitoring began, and ``still_s`` the
    time since the last known step. ``ms`` is milliseconds per iteration by part. ``interfaces`` has
    bytes sent and received. Unknown values are None or empty.
    """

    rank: int
    report: Report | None = None
    silent_s: float = 0.0
    still_s: float = 0.0
    rate: float | None = None
    ms: dict[str, float] = field(default_factory=dict)
    interfaces: dict[str, tuple[float, float]] = field(default_factory=dict)
    sections: tuple[Section, ...] = ()

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
            return f"not heard for {self.silent_s:.0f} s"
        if self.report.ended:
            return "ended"
        if self.silent:
            return f"silent for {self.silent_s:.0f} s"
        if self.still_s > max(STILL_S + self._turn_s, 5 / self.rate if self.rate else 0.0):
            return f"no step for {self.still_s:.0f} s"
        return "running"

    @staticmethod
    def from_json(data: Any) -> Worker:
        """Build a worker from its part of `Job.to_json`; raises Malformed if it is not valid."""
        report, rate = data["report"], data["rate"]
        return Worker(
            rank=whole(data["rank"]),
            report=None if report is None else Report.from_json(report),
            silent_s=seconds(data["silent_s"]),
            still_s=seconds(data["still_s"]),
            rate=None if rate is None else seconds(rate),
            ms=by_part(data["ms"]),
            interfaces=named(data["interfaces"], _rates),
            sections=tuple(section_of(each, rates=True) for each in few(data["sections"], MANY)),
        )


@dataclass(frozen=True, slots=True)
class Job:
    """A job at one moment, ``watched_s`` seconds after monitoring began; workers are by rank."""

    name: str
    watched_s: float
    unix_s: float
    workers: tuple[Worker, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        data = asdict(self)
        for listed, worker in zip(data["workers"], self.workers, strict=True):
            listed["state"] = worker.state
        return data

    @staticmethod
    def from_text(text: str | bytes) -> Job:
        """Parse the JSON of `to_json`; raises Malformed if it is not valid."""
        data = parsed(text)
        try:
            return Job(
                text_of(data["name"]),
                seconds(data["watched_s"]),
                seconds(data["unix_s"]),
                tuple(Worker.from_json(each) for each in few(data["workers"], MOST_WORKERS)),
            )
        except (KeyError, TypeError, AttributeError) as err:
            raise Malformed(f"no job: {type(err).__name__} {err}"[:128]) from None


def _rates(value: Any) -> tuple[float, float]:
    return pair(value, seconds)
