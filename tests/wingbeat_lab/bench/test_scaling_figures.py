"""``benchmarks/scaling.py``: closed forms beside events, and what they say about many workers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from helpers.amounts import slow_except
from helpers.scripts import benchmark
from wingbeat import simulator

LINKS = simulator.Links(bytes_per_s=10e9 / 8 * 1448 / 1538, latency_s=100e-6)


@pytest.fixture(scope="module")
def scaling() -> Iterator[ModuleType]:
    with benchmark("scaling") as module:
        yield module


ROWS = (
    "ring", "DeAR", "doubling", "mesh", "two levels", "sketch", "low rank", "top-k", "servers",
    "8 servers", "Canary", "Ripples", "AD-PSGD", "DiLoCo",
)  # fmt: skip
SLOW = {"servers", "8 servers", "AD-PSGD", "Canary"}
QUICK = ("ring", "DeAR", "doubling", "mesh", "two levels", "sketch", "low rank", "top-k", "DiLoCo")
"""Rows whose events take little time."""


def row_of(scaling: ModuleType, name: str) -> Any:
    return next(row for row in scaling.ROWS if row.name == name)


def setting(scaling: ModuleType, **links: float) -> Any:
    arguments = scaling.argparse.Namespace(gbit=10.0, latency_us=100.0)
    made = scaling.setting_of(arguments, "resnet50")
    return replace(made, links=replace(made.links, **links))


def test_every_row_has_a_test(scaling: ModuleType) -> None:
    assert tuple(row.name for row in scaling.ROWS) == ROWS


@pytest.mark.parametrize("workers", slow_except([8], [8, 16, 64]))
@pytest.mark.parametrize("name", slow_except(QUICK, ROWS))
def test_closed_form_is_within_the_limit_of_events(
    scaling: ModuleType, name: str, workers: int
) -> None:
    if name in SLOW and workers > 8:
        pytest.skip("the command compares these")
    row, own = row_of(scaling, name), setting(scaling)
    events = scaling.simulated(row, own, workers)
    form = row.form(own, row.strategy, workers).seconds
    assert abs(form / events - 1) <= scaling.WITHIN


@pytest.mark.parametrize("name", ["ring", "DeAR", "doubling", "mesh", "sketch"])
@pytest.mark.parametrize(("gbit", "latency_us"), [(1.0, 20.0), (40.0, 500.0)])
def test_closed_form_follows_other_links(
    scaling: ModuleType, name: str, gbit: float, latency_us: float
) -> None:
    row = row_of(scaling, name)
    own = setting(scaling, bytes_per_s=gbit * 1e9 / 8, latency_s=1e-6 * latency_us)
    events = scaling.simulated(row, own, 32)
    form = row.form(own, row.strategy, 32).seconds
    assert abs(form / events - 1) <= scaling.WITHIN


@pytest.mark.parametrize("name", slow_except([name for name in ROWS if name != "AD-PSGD"], ROWS))
def test_eight_times_as_many_workers_never_shorten_an_iteration(
    scaling: ModuleType, name: str
) -> None:
    row, own = row_of(scaling, name), setting(scaling)
    found = [row.form(own, row.strategy, n).seconds for n in scaling.SIZES]
    assert found == sorted(found)
    assert found[0] >= 0.999 * own.alone_s


@pytest.mark.parametrize("name", [name for name in ROWS if name != "AD-PSGD"])
def test_slower_links_never_shorten_an_iteration(scaling: ModuleType, name: str) -> None:
    """But for pairs, whose step comes from events."""
    row = row_of(scaling, name)
    for workers in scaling.SIZES:
        slow, late, usual = (
            row.form(own, row.strategy, workers).seconds
            for own in (
                setting(scaling, bytes_per_s=LINKS.bytes_per_s / 4),
                setting(scaling, latency_s=4 * LINKS.latency_s),
                setting(scaling),
            )
        )
        assert min(slow, late) >= usual


def test_ring_grows_by_two_latencies_for_each_worker_and_bucket(scaling: ModuleType) -> None:
    """DeAR, Eqs. 3 and 4: P - 1 latencies in each half."""
    row, own = row_of(scaling, "ring"), setting(scaling)
    few, more = (row.form(own, row.strategy, n).latency_s for n in (1000, 1001))
    buckets = len(scaling.closed_forms.buckets_of(own.model, row.strategy.plan.fusion()).numel)
    assert more - few == pytest.approx(2 * buckets * own.links.latency_s)


def test_state_machine_of_the_generator_takes_its_time_of_each_request(
    scaling: ModuleType,
) -> None:
    row, own = row_of(scaling, "Ripples"), setting(scaling)
    slower = replace(own, requests_per_s=10_000.0)
    usual, late = (row.form(each, row.strategy, 100_000).seconds for each in (own, slower))
    assert late - usual == pytest.approx(100_000 / 10_000)


def test_half_is_the_first_number_below_one_half(scaling: ModuleType) -> None:
    assert scaling.below_half(lambda workers: 100 / (100 + workers), 1) == 101
    assert scaling.below_half(lambda workers: 100 / (100 + workers), 8) == 104
    assert scaling.below_half(lambda _: 0.5, 1) is None


def test_report_has_both_and_a_picture(
    scaling: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, picture = tmp_path / "out.json", tmp_path / "out.svg"
    words = ["--rows", "ring", "DeAR", "--most", "16", "--json", str(path), "--svg", str(picture)]
    monkeypatch.setattr(sys, "argv", ["scaling.py", *words])
    assert scaling.main() == 0
    kept = json.loads(path.read_text(encoding="utf-8"))
    rows = kept["models"]["resnet50"]["rows"]
    assert [each["workers"] for each in rows["ring"]["compared"]] == [8, 16]
    assert [table["title"].split(":")[0] for table in kept["tables"]] == [
        "efficiency by workers",
        "what an iteration demands, overlapped or not",
        "closed forms and events",
        "what grows beside an iteration",
    ]
    drawn = picture.read_text(encoding="utf-8")
    assert all(f"{name}, below 0.5 from" in drawn for name in ("ring", "DeAR"))


def test_a_difference_beyond_the_limit_is_missed(
    scaling: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setattr(scaling, "simulated", lambda *_: 1.0)
    words = ["--rows", "ring", "--most", "8", "--json", str(tmp_path / "a")]
    monkeypatch.setattr(sys, "argv", ["scaling.py", *words])
    assert scaling.main() == 1
    assert "MISSED: resnet50, ring, 8 workers: the closed form is" in capsys.readouterr().out


def test_a_latency_below_zero_is_refused(
    scaling: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:  # fmt: skip
    words = ["--latency-us", "-1", "--json", str(tmp_path / "a")]
    monkeypatch.setattr(sys, "argv", ["scaling.py", *words])
    assert scaling.main() == 2
    assert "--latency-us from 0" in capsys.readouterr().err
