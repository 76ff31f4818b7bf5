"""Prometheus metrics of a job, in the text format, version 0.0.4.

The supervisor imports this module only if it serves HTTP: the library takes 20 ms to import.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from prometheus_client import Metric, generate_latest
from prometheus_client.registry import Collector

from wingbeat.observe.report import Job

__all__ = ["CONTENT_TYPE", "exposition"]


def exposition(job: Job) -> bytes:
    """Return the metrics page.

    >>> print(exposition(Job("train-1", 3.0, 0.0, ())).decode(), end="")
    # HELP wingbeat_workers Workers of the job.
    # TYPE wingbeat_workers gauge
    wingbeat_workers{job="train-1"} 0.0
    """
    return generate_latest(_Collector(job))


class _Collector(Collector):
    """The metrics of one job; families without samples are left out."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def collect(self) -> Iterable[Metric]:
        for name, kind, text, samples in _families(self._job):
            family = Metric(name.removesuffix("_total"), text, kind)
            for labels, value in samples:
                family.add_sample(name, {"job": self._job.name, **labels}, value)
            if family.samples:
                yield family


_Sample: TypeAlias = "tuple[Mapping[str, str], float]"


def _families(job: Job) -> Iterator[tuple[str, str, str, Iterable[_Sample]]]:
    reports = [
        (worker.report, {"rank": str(worker.rank), "host": worker.report.host})
        for worker in job.workers
        if worker.report is not None
    ]
    yield "wingbeat_workers", "gauge", "Workers of the job.", [({}, len(job.workers))]
    silent = [({"rank": str(w.rank)}, w.silent_s) for w in job.workers]
    yield "wingbeat_silent_seconds", "gauge", "Time since the worker's last report.", silent
    steps = [(who, float(r.iteration)) for r, who in reports]
    yield "wingbeat_iterations_total", "counter", "Optimizer steps.", steps
    spent = [({**who, "part": part}, s) for r, who in reports for part, s in r.spent_s.items()]
    yield "wingbeat_spent_seconds_total", "counter", "Time by part of the iteration.", spent
    moved = [
        ({**who, "interface": name, "direction": way}, count)
        for r, who in reports
        for name, counts in r.interfaces.items()
        for way, count in zip(("sent", "received"), counts, strict=True)
    ]
    text = "Bytes of the worker's host, by the kernel's counters."
    yield "wingbeat_interface_bytes_total", "counter", text, moved
    rare = [({**who, "what": what}, float(n)) for r, who in reports for what, n in r.counts.items()]
    yield "wingbeat_events_total", "counter", "Things that should be rare.", rare
    # One family cannot mix counters (growing cells) and gauges.
    for grows, name, kind in (
        (True, "wingbeat_strategy_total", "counter"),
        (False, "wingbeat_strategy", "gauge"),
    ):
        cells = [
            ({**who, "table": section.name, "column": column}, cell)
            for r, who in reports
            for section in r.sections
            for column, cell in section.cells.items()
            if bool(section.unit) is grows and not isinstance(cell, str)
        ]
        yield name, kind, "What the strategy shows.", cells
