"""Predictions beside the rows that were measured in the lab, in ``docs/results``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from wingbeat.prediction import Cluster, predict
from wingbeat.prediction.baselines import BASELINES
from wingbeat.prediction.cluster import parse_rate, payload
from wingbeat.simulator import Links, Work
from wingbeat.strategies.spelling import parse
from wingbeat.types import Layout
from wingbeat_lab import paced

RESULTS = Path(__file__).parents[2] / "docs" / "results"

UNPREDICTED = ("single",)


def _report(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["report"]


def _off(
    name: str, measured_s: float, cluster: Cluster, *, scale: float, stretch: float = 1.0
) -> str:
    """Return what is outside its interval, or nothing; buckets and codecs scale as in the lab."""
    strategy = (BASELINES.get(name) or parse(name)).scaled(scale)
    profile = paced.load_profile("resnet50").scaled(scale)
    work = Work(codecs=max(1.0, stretch / scale))
    found = predict(strategy, paced.simulator_model(profile, stretch), cluster, work=work)
    low, high = found.low_s / stretch, found.high_s / stretch
    if low <= measured_s <= high:
        return ""
    return f"{name}: measured {measured_s:.3f} s, predicted {low:.3f} to {high:.3f} s"


@pytest.mark.parametrize(("name", "hosts", "per_host"), [("hosts-2x4", 2, 4), ("hosts-4x2", 4, 2)])
def test_predict_hosts_of_several_workers_are_as_measured(
    name: str, hosts: int, per_host: int
) -> None:
    links = Links(bytes_per_s=payload(0.1e9))
    cluster = Cluster(links=links, layout=Layout.even(hosts, per_host))
    rows = {row["strategy"]: row["typical_s"] for row in _report(name)["runs"]}
    off = [
        _off(row, seconds, cluster, scale=0.1)
        for row, seconds in rows.items()
        if row not in UNPREDICTED
    ]
    assert len(off) >= 6
    assert not any(off), "\n".join(filter(None, off))


@pytest.mark.parametrize("rate", ["1gbit", "4gbit", "10gbit"])
def test_predict_four_workers_at_several_rates_are_as_measured(rate: str) -> None:
    [cell] = [cell for cell in _report("best")["cells"] if cell["rate"] == rate]
    scale, stretch = 0.05, cell["stretch"]
    links = Links(bytes_per_s=payload(parse_rate(rate)) * scale / stretch)
    cluster = Cluster(links=links, layout=Layout.even(4, 1))
    off = [
        _off(row, found["iteration_s"], cluster, scale=scale, stretch=stretch)
        for row, found in cell["rows"].items()
        if not found["limited_by_cores"]
    ]
    assert len(off) >= 8
    assert not any(off), "\n".join(filter(None, off))
