"""``benchmarks/ripples_virtual.py``: rows of the lab beside virtual time, and what is judged."""

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

ROWS = ("ddp", "allreduce", "ripples:policy=static", "ripples", "localsgd:every=4", "adpsgd")


@pytest.fixture(scope="module")
def virtual() -> Iterator[ModuleType]:
    with benchmark("ripples_virtual") as module:
        yield module


def given(path: Path, lab_s: float) -> argparse.Namespace:
    config = BenchConfig(
        lab="star:2@25gbit", model="paced:vgg16_cifar_1080ti@0.1", strategies=ROWS, per_host=2,
        stretch=80.0, slow=("1=+2x",), measure=False,
    )  # fmt: skip
    rows = {row: {"iteration_s": lab_s} for row in ROWS}
    path.write_text(json.dumps({"19": {"2": {"rows": rows, "config": asdict(config)}}}))
    return argparse.Namespace(measured=path, within=0.1, jitter=0.0, iterations=10)


def test_rows_that_can_be_simulated_are_and_those_of_groups_are_judged(
    virtual: ModuleType, tmp_path: Path
) -> None:
    report: dict[str, Any] = {}
    missed = virtual.fill(given(tmp_path / "lab.json", 100.0), report)
    rows = report["19"]["2"]
    assert list(rows) == ["allreduce", "ripples:policy=static", "ripples", "localsgd:every=4"]
    # Who waits for a slow worker takes as long as that one; smart groups do not.
    assert rows["ripples:policy=static"]["virtual_s"] > 0.7
    assert rows["ripples"]["virtual_s"] < 0.6
    assert all(row["off"] == row["virtual_s"] / 100.0 - 1 for row in rows.values())
    assert [line.split(":")[1].strip() for line in missed] == ["ripples", "ripples"]


def test_ripples_virtual_file_that_is_no_report_is_refused(
    virtual: ModuleType, tmp_path: Path
) -> None:
    path = tmp_path / "file.json"
    for text in ("", "[]", "{}", '{"17": {"0": {"rows": {}}}}'):
        path.write_text(text)
        with pytest.raises(UsageError, match=r"no report of|has no rows of"):
            virtual.fill(argparse.Namespace(measured=path, within=0.1), {})
    args = given(path, 1.0)
    args.measured.write_text(args.measured.read_text().replace("1=+2x", "random:+2x"))
    with pytest.raises(UsageError, match="allowed is one worker, always"):
        virtual.fill(args, {})
