"""Reports of workers as they might be."""

from __future__ import annotations

from typing import Any

from wingbeat.observe.meter import Section
from wingbeat.observe.report import Job, Report, Watch

SPENT = {
    "forward": 0.1,
    "backward": 0.2,
    "update": 0.01,
    "other": 0.005,
    "exchange": 0.05,
    "codec": 0.02,
}
"""Seconds an iteration."""


def report(rank: int = 0, second: int = 0, *, size: int = 2, **fields: Any) -> Report:
    """What a worker says after so many seconds, of two iterations and 1 MB each."""
    steps = 2 * second
    made = {
        "host": f"node{rank}",
        "pid": 100 + rank,
        "strategy": "DeAR()",
        "number": second,
        "at_s": 50.0 + second,
        "iteration": steps,
        "spent_s": {part: steps * s for part, s in SPENT.items()},
        "interfaces": {"eth0": (7_000 + 1_000_000 * second, 500_000 * second)},
    }
    return Report(rank=rank, size=size, **{**made, **fields})


def add(watch: Watch, made: Report, now: float) -> None:
    """Add a report of the rank that it names."""
    assert watch.add_report(made.rank, made.to_text(), now) == ""


def job(
    workers: int = 2, seconds: int = 20, *, sections: tuple[Section, ...] = (), **fields: Any
) -> Job:
    """A job that has run for so many seconds, of alike workers."""
    watch = Watch("train-4711", 0.0)
    for second in range(seconds + 1):
        for rank in range(workers):
            made = report(rank, second, size=workers, sections=sections, **fields)
            add(watch, made, float(second))
    return watch.job(float(seconds), 1_700_000_000.0)
