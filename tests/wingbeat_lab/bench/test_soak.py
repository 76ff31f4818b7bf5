"""``benchmarks/soak.py``: its slopes and limits, and a minute of it."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from helpers.scripts import benchmark


@pytest.fixture(scope="module")
def soak() -> Iterator[ModuleType]:
    with benchmark("soak") as module:
        yield module


def samples(
    name: str, *, first: float = 0.0, last: float = 600.0, **per_minute: float
) -> list[dict[str, Any]]:
    """Two noisy samples a second of a process whose figures grow by so much per minute."""
    rng = random.Random(name)
    found = []
    for number in range(int(first) // 2, int(last) // 2 + 1):
        at = 2.0 * number
        figures: dict[str, float] = dict.fromkeys(("threads", "sockets", "descriptors"), 5)
        figures |= {"shared_mb": 1.0, "rss_mb": 500.0 + rng.gauss(0, 0.2)}
        if rng.random() < 0.1:  # an average in progress
            figures |= {"sockets": 9, "rss_mb": figures["rss_mb"] + 30}
        for figure, growth in per_minute.items():
            figures[figure] += int(growth * at / 60) if figure != "rss_mb" else growth * at / 60
        found.append({"at": at, "process": name} | figures)
    return found


def judged(module: ModuleType, *series: list[dict[str, Any]]) -> list[str]:
    together = sorted((each for one in series for each in one), key=lambda each: each["at"])
    growth = module.growths(together, 120.0)
    missed: list[str] = module.judged(
        {"growth": growth, "objects": {}, "processes": [], "entries": ["tmp/torchinductor_root"]}
    )
    return missed


def test_flat_figures_with_outliers_miss_no_limit(soak: ModuleType) -> None:
    assert judged(soak, samples("worker 0 (1)"), samples("store (2)")) == []


@pytest.mark.parametrize(
    ("figure", "per_minute"),
    [("rss_mb", 0.2), ("threads", 0.3), ("sockets", 0.5), ("descriptors", 1.0)],
)
def test_growth_of_any_long_lived_process_misses_a_limit(
    soak: ModuleType, figure: str, per_minute: float
) -> None:
    grows = samples("store (2)", **{figure: per_minute})
    [missed] = judged(soak, samples("worker 0 (1)"), grows)
    assert missed.startswith("store (2): ")
    assert ("memory" if figure == "rss_mb" else figure) in missed


def test_processes_that_were_started_later_are_not_judged(soak: ModuleType) -> None:
    young = samples("worker 2 (3)", first=60.0, rss_mb=100.0)
    assert judged(soak, samples("worker 0 (1)"), young) == []
    assert judged(soak, samples("store (1)"), samples("worker 0 (2)", last=500.0)) == [
        "no worker lived from the begin to the end"
    ]


def test_what_is_left_misses_a_limit(soak: ModuleType) -> None:
    growth = soak.growths(samples("worker 0 (1)"), 120.0)
    found = {"growth": growth, "objects": {}, "processes": ["7: server"], "entries": ["top/a.sock"]}
    assert soak.judged(found) == ["process 7: server is left", "top/a.sock is left"]


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(900)
def test_minute_of_averages_with_kills_leaves_nothing_and_grows_nowhere(
    soak: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["soak.py", "--minutes", "1", "--strategies", "ripples"]
    monkeypatch.setattr(sys, "argv", [*words, "--json", str(tmp_path / "a.json")])
    assert soak.main() == 0
    found = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["rows"]["ripples"]
    assert [each["how"] for each in found["disturbed"]][:2] == ["killed", "stopped"]
    assert {name.partition(" (")[0] for name in found["growth"]} >= {"worker 0", "store"}


def test_report_has_all_processes_at_one_moment_in_thirty_seconds(soak: ModuleType) -> None:
    found = [{"at": at, "process": name} for at in (0.0, 2.0, 29.9, 31.0, 33.0) for name in "ab"]
    assert [(each["at"], each["process"]) for each in soak.kept(found)] == [
        (0.0, "a"), (0.0, "b"), (31.0, "a"), (31.0, "b"),
    ]  # fmt: skip
