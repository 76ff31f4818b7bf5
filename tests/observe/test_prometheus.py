"""The page for Prometheus."""

from __future__ import annotations

import re

from prometheus_client.parser import text_string_to_metric_families

from helpers.reports import add, job, report
from wingbeat.observe.meter import Section
from wingbeat.observe.prometheus import exposition
from wingbeat.observe.report import Job, Watch

ETH = {"interface": "eth0"}

_SAMPLE = re.compile(
    r'^(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)\{(?P<labels>([a-z_]+="([^"\\\n]|\\["\\n])*",?)*)\} '
    r"(?P<value>[0-9.eE+-]+|NaN|[+-]Inf)$"
)


def page_of(each: Job) -> str:
    return exposition(each).decode()


def samples(page: str) -> list[tuple[str, dict[str, str], float]]:
    """Each sample, as Prometheus' own parser reads it."""
    families = text_string_to_metric_families(page)
    return [(s.name, s.labels, s.value) for family in families for s in family.samples]


def test_every_line_is_of_the_format_and_every_family_is_declared_once() -> None:
    sections = (
        Section("gei", {"c0": "1101", "behind": 2}),
        Section("classes", {"0 out": 5}, "B/s"),
    )
    page = page_of(job(3, sections=sections, counts={"dropped": 1}))
    assert page.endswith("\n")
    declared: list[str] = []
    for line in page.splitlines():
        if line.startswith("# TYPE "):
            declared.append(line.split()[2])
        elif not line.startswith("# HELP "):
            sample = _SAMPLE.match(line)
            assert sample, line
            assert sample["name"] == declared[-1]
    assert len(declared) == len(set(declared))
    assert all(("counter" in line) == line.split()[2].endswith("_total")
               for line in page.splitlines() if line.startswith("# TYPE"))  # fmt: skip


def test_the_figures_are_the_workers() -> None:
    page = page_of(
        job(2, 20, sections=(Section("gei", {"behind": 2}), Section("classes", {"a": 5}, "B/s")))
    )
    who = {"job": "train-4711", "rank": "1", "host": "node1"}
    found = samples(page)
    for name, labels, value in (
        ("wingbeat_workers", {"job": "train-4711"}, 2),
        ("wingbeat_silent_seconds", {"job": "train-4711", "rank": "1"}, 0),
        ("wingbeat_iterations_total", who, 40),
        ("wingbeat_spent_seconds_total", {**who, "part": "backward"}, 8),
        ("wingbeat_interface_bytes_total", {**who, **ETH, "direction": "sent"}, 20007000),
        ("wingbeat_interface_bytes_total", {**who, **ETH, "direction": "received"}, 10000000),
        ("wingbeat_strategy", {**who, "table": "gei", "column": "behind"}, 2),
        ("wingbeat_strategy_total", {**who, "table": "classes", "column": "a"}, 5),
    ):
        assert (name, labels, value) in found
    assert page.count('column="behind"') == page.count('column="a"') == 2


def test_labels_are_escaped() -> None:
    watch = Watch("x", 0.0)
    add(watch, report(0, 0, host='a"b\\c'), 0.0)
    assert 'host="a\\"b\\\\c"' in page_of(watch.job(0.0, 0.0))


def test_a_worker_that_was_never_heard_is_only_silent() -> None:
    watch = Watch("x", 0.0)
    add(watch, report(1, 0), 0.0)
    lines = [line for line in page_of(watch.job(7.0, 0.0)).splitlines() if 'rank="0"' in line]
    assert lines == ['wingbeat_silent_seconds{job="x",rank="0"} 7.0']
