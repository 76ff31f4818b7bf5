"""``benchmarks/order.py``: what it prints and writes, and how it judges."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from helpers.scripts import benchmark


@pytest.fixture(scope="module")
def order() -> Iterator[ModuleType]:
    with benchmark("order") as module:
        yield module


@pytest.fixture(scope="module")
def said(order: ModuleType) -> dict[str, float]:
    found: dict[str, float] = order.points()
    return found


@pytest.fixture(scope="module")
def tables(order: ModuleType) -> list[dict[str, Any]]:
    return [order.efficiencies(model, 10.0, seeds=5) for model in order.PAPER[10.0]]


def test_the_papers_points_are_met(
    order: ModuleType, said: dict[str, float], tables: list[dict[str, Any]]
) -> None:
    assert order.missed(said, tables) == []
    assert said["speedup"] == pytest.approx(0.331, abs=0.001)
    # All of the pull, 574.7 MB at 1 GB/s, is exposed in reverse order.
    assert said["images_per_s_of_paper"] == pytest.approx(64 * 0.31 / 0.574669, rel=1e-4)


def test_less_overlap_is_not_faster(tables: list[dict[str, Any]]) -> None:
    for row in tables:
        found = row["efficiency"]
        assert (
            found["reverse"] < found["random"] < found["best two"] < found["forward"] <= 1.0 + 1e-9
        )
        assert found["conv first"] <= found["best two"]
        assert found["ready, half"] <= found["ready"]


def test_in_reverse_order_vgg_waits_for_seven_eighths_of_its_bytes(
    tables: list[dict[str, Any]],
) -> None:
    (vgg,) = [row for row in tables if row["model"] == "vgg19"]
    pull_s, alone_s = 0.574669 * 8 / 10 * 7 / 8, 64 / 36.89
    assert vgg["efficiency"]["reverse"] == pytest.approx(alone_s / (alone_s + pull_s), abs=1e-3)
    # With the fully connected layers' 86.05% in the lower class, the rest is left to wait for.
    waits_s = pull_s * (1 - 0.8605)
    assert vgg["efficiency"]["conv first"] == pytest.approx(alone_s / (alone_s + waits_s), abs=1e-3)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"speedup": 0.37}, "37.0%, not 31%"),
        ({"speedup": 0.25}, "25.0%, not 31%"),
        ({"enough_gbit_2_percent": 90.0}, "90 Gbit/s do without"),
        ({"peak_gbit_v100": 8.0, "peak_gbit_k40": 8.0}, "V100"),
    ],
)
def test_what_contradicts_the_paper_is_missed(
    order: ModuleType, said: dict[str, float], change: dict[str, float], part: str
) -> None:
    (line,) = order.missed({**said, **change}, [])
    assert part in line


@pytest.mark.parametrize("name", ["reverse", "random", "conv first", "best two", "forward"])
def test_an_order_below_the_bound_is_missed(
    order: ModuleType, said: dict[str, float], tables: list[dict[str, Any]], name: str
) -> None:
    broken = copy.deepcopy(tables)
    broken[1]["seconds"][name] = 0.999 * broken[1]["bound_s"]
    assert order.missed(said, broken) == [f"vgg19 at 10 Gbit/s: {name} beats the bound"]


def test_order_report_is_printed_and_written(
    order: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "new" / "order.json"
    command = ["order.py", "--seeds", "3", "--gbit", "8", "40", "--json", str(path)]
    monkeypatch.setattr("sys.argv", command)
    assert order.main() == 0
    report = json.loads(path.read_text(encoding="utf-8"))
    assert [(row["device"], row["gbit"]) for row in report["figure_4b"]] == [
        ("K40", 8.0), ("K40", 40.0), ("V100", 8.0), ("V100", 40.0),
    ]  # fmt: skip
    found = [row["speedup"] for row in report["figure_4b"]]
    assert found == pytest.approx([0.331, 0.066, 0.089, 0.320], abs=1e-3)
    assert len(report["efficiencies"]) == 8
    assert [len(table["rows"]) for table in report["tables"]] == [2, 8]
    printed = capsys.readouterr().out
    assert "33.1%" in printed
    assert "ready" in printed
