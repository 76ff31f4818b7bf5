"""What is known of a whole job at one moment: a value that every view is made from."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from wingbeat.monitor.report import (
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
from wingbeat.observe.meter import Section

SILENT_S = 5.0
"""Seconds without a report after which a worker is called silent; later in large jobs."""

STILL_S = 10.0
"""Seconds without a step after which that is said."""

MOST_WORKERS = 4096


@dataclass(frozen=True, slots=True)
class Worker:
    """What is known of one worker.

    Attributes:
        rank: which.
        report: its last one; None if it has sent none.
        silent_s: seconds since that came, or since the job is watched.
        still_s: seconds since it made a step, as far as is known.
        rate: iterations a second, lately; None where that is not known.
        ms: milliseconds an iteration by part, lately; empty where that is not known.
        interfaces: bytes a second sent and received, lately, by interface.
        sections: what strategies show; of what grows, by how much a second.
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
        """Seconds by which a report may be later, as others are read before it."""
        return 0.0 if self.report is None else (self.report.size - 1) // READS

    @property
    def silent(self) -> bool:
        """Whether there was no report for so long that one is missing."""
        return self.silent_s > SILENT_S + self._turn_s

    @property
    def state(self) -> str:
        """How it is, in some words."""
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
        """Check and rebuild what `Job.to_text` says of a worker.

        Raises:
            Malformed: it is something else.
        """
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
    """A job at one moment.

    Attributes:
        name: what `wingbeat top` calls it.
        watched_s: seconds for which it has been watched.
        unix_s: when this was, in seconds since 1970.
        workers: by rank.
    """

    name: str
    watched_s: float
    unix_s: float
    workers: tuple[Worker, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        data = asdict(self)
        for listed, worker in zip(data["workers"], self.workers, strict=True):
            listed["state"] = worker.state
        return data

    @staticmethod
    def from_text(text: str | bytes) -> Job:
        """Check and rebuild what came from a socket.

        Raises:
            Malformed: it is not what ``json.dumps(job.to_json())`` makes.
        """
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
