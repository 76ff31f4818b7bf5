"""``benchmarks/canary_beside.py``: rows of the lab beside virtual time, and what is judged."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from helpers.scripts import benchmark
from wingbeat.errors import UsageError
from wingbeat_lab.bench.config import BenchConfig

OURS = "canary:s=3,p=1,colayers=2,compression=fp32,encrypted=False"
ROWS = ("bml", OURS, "ddp")


@pytest.fixture(scope="module")
def beside() -> Iterator[ModuleType]:
    with benchmark("canary_beside") as module:
        yield module


def given(path: Path, slow: tuple[str, ...] = (), rows: tuple[str, ...] = ROWS) -> Any:
    config = BenchConfig(
        lab="bcube:2x2@10gbit", model="paced:vgg16_cifar_1080ti@0.05", strategies=rows,
        iterations=4, rounds=1, stretch=8.0, slow=slow, traffic=True, measure=False,
    )  # fmt: skip
    found = {row: {"iteration_s": 100.0, "bytes_per_iteration": 1e6} for row in rows}
    path.write_text(json.dumps({"23": {"equal": {"rows": found, "configs": [asdict(config)]}}}))
    out = path.with_name("out.json")
    return argparse.Namespace(measured=path, within=0.1, cores=None, message=None, json=out)


def test_rows_are_simulated_as_their_config_says_and_ours_are_judged(
    beside: ModuleType, tmp_path: Path
) -> None:
    report: dict[str, Any] = {}
    missed = beside.fill(given(tmp_path / "lab.json"), report)
    rows = report["23"]["equal"]
    assert list(rows) == ["bml", OURS]
    assert 0.04 < rows[OURS]["virtual_s"] < rows["bml"]["virtual_s"] * 1.5
    # Nine megabytes at 0.05, out and back to 3 of 4, by 4/3 cards on average.
    assert rows[OURS]["virtual_bytes"] == pytest.approx(0.05 * 9.23e6 * 2 * 3 / 4 * 4 / 3, rel=0.3)
    assert [line.split(": ")[-1].split()[0] for line in missed] == ["seconds", "bytes"]
    (table,) = json.loads((tmp_path / "out.json").read_text())["tables"]
    assert "on bcube:2x2@10gbit, slow motion of 8, 4 iterations" in table["title"]
    assert {row[0] for row in table["rows"][:2]} == {"bml", OURS}
    assert table["rows"][2] == ["ddp", "100.000", "", "", "", "", "", ""]


def test_what_the_docs_keep_is_a_report_as_well(beside: ModuleType, tmp_path: Path) -> None:
    args = given(tmp_path / "lab.json", rows=("bml",))
    args.measured.write_text(json.dumps({"report": json.loads(args.measured.read_text())}))
    report: dict[str, Any] = {}
    beside.fill(args, report)
    assert list(report["23"]["equal"]) == ["bml"]


def test_canary_beside_with_a_slow_worker_takes_longer(beside: ModuleType, tmp_path: Path) -> None:
    equal: dict[str, Any] = {}
    slow: dict[str, Any] = {}
    beside.fill(given(tmp_path / "a.json", rows=("bml",)), equal)
    beside.fill(given(tmp_path / "b.json", ("1=+2x",), rows=("bml",)), slow)
    seconds = [found["23"]["equal"]["bml"]["virtual_s"] for found in (equal, slow)]
    assert seconds[1] > 1.8 * seconds[0]


def test_a_bench_counts_between_iterations_of_its_own(beside: ModuleType) -> None:
    one = [(0.0, 0.0), (1.0, 0.5), (2.0, 1.0), (3.0, 2.5), (4.0, 3.5)]
    other = [(0.0, 0.0), (1.5, 1.0), (2.5, 2.0), (3.5, 3.0), (5.0, 4.0)]
    assert beside.timed([one, other], lead=1, count=2) == (1.5, 3.5)
    assert beside.timed([one, other], lead=1, count=3) == (1.5, 5.0)


def test_what_cannot_be_simulated_is_refused(beside: ModuleType, tmp_path: Path) -> None:
    row = OURS.replace("fp32", "lowrank")
    with pytest.raises(UsageError, match=r"how small .* makes gradients depends on which they are"):
        beside.fill(given(tmp_path / "lab.json", rows=(row,)), {})
    (tmp_path / "lab.json").write_text('{"23": {"equal": {"rows": {}}}}')
    with pytest.raises(UsageError, match="has no rows of figures 23, 20"):
        beside.fill(argparse.Namespace(measured=tmp_path / "lab.json", within=0.1), {})
