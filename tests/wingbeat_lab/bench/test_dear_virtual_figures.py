"""``benchmarks/dear_virtual.py``: figures of DeAR with the paper's workers, in virtual time."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from helpers.scripts import benchmark
from wingbeat import AllReduce, Strategy


@pytest.fixture(scope="module")
def virtual() -> Iterator[ModuleType]:
    with benchmark("dear_virtual") as module:
        yield module


def test_halves_that_hide_under_forward_make_dear_faster(
    virtual: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "out.json"
    words = ["--figures", "6", "--models", "resnet50", "--workers", "20"]
    words += ["--latency-us", "0", "500", "--gbit", "5", "10"]
    monkeypatch.setattr(sys, "argv", ["dear_virtual.py", *words, "--json", str(path)])
    assert virtual.main() == 0
    kept = json.loads(path.read_text(encoding="utf-8"))
    found = kept["figures"]["6"]
    for gbit in (5, 10):
        late, usual = (found[f"resnet50, {gbit} Gbit/s, {latency} us"] for latency in (500, 0))
        assert late["WFBP"] > usual["WFBP"]
        assert late["WFBP"] > late["DeAR"]
    few, many = (found[f"resnet50, {gbit} Gbit/s, 0 us"]["WFBP"] for gbit in (10, 5))
    assert few < many
    [table] = kept["tables"]
    gains = [float(row[1]) for row in table["rows"]]
    assert len(gains) == 4
    assert gains == sorted(gains)
    assert "20 workers in a ring" in table["title"]
    assert table["columns"][1:4] == ["DeAR", "ByteScheduler", "ByteScheduler, 32 MB"]


def test_bytescheduler_loses_to_dear_with_the_latency_of_its_names(virtual: ModuleType) -> None:
    bars = virtual.FIGURES["6"].bars
    ratios = []
    for latency in (0.0, 200e-6):
        dear, ours = (
            virtual.seconds("resnet50", bars[bar][0], 20, 10.0, latency)
            for bar in ("DeAR", "ByteScheduler")
        )
        ratios.append(ours / dear)
    assert ratios[1] > max(1.0, ratios[0])


def test_the_best_of_several_sizes_is_a_bar(
    virtual: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:  # fmt: skip
    def made(_model: str, strategy: Strategy, *_: object) -> float:
        best = strategy in virtual.FIGURES["9"].bars["DeAR, best size"]
        return abs(strategy.plan.fusion().bucket_bytes / 2**20 - 35.0) + 1.0 if best else 2.0

    monkeypatch.setattr(virtual, "seconds", made)
    words = ["--figures", "9", "--models", "resnet50", "--gbit", "10", "--latency-us", "5"]
    path = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["dear_virtual.py", *words, "--json", str(path)])
    assert virtual.main() == 0
    [found] = json.loads(path.read_text(encoding="utf-8"))["figures"]["9"].values()
    assert found["DeAR, best size"] == 1.0
    assert found["Horovod-FB"] == 2.0
    assert "Fig. 9 in virtual time" in capsys.readouterr().out


def test_latency_is_paid_by_every_worker_in_each_half(virtual: ModuleType) -> None:
    """Eqs. 3 and 4: P - 1 latencies in a half, for each of 161 tensors that wait for each other.

    Up to 16 workers exchange small tensors in single rounds.
    """
    few, many = (
        virtual.seconds("resnet50", AllReduce(plan="none"), workers, 10.0, 1e-3)
        for workers in (17, 19)
    )
    assert many - few > 161 * 2 * 1e-3


def test_a_dear_that_is_slower_is_missed_and_a_faster_row_noted(
    virtual: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:  # fmt: skip
    def made(_model: str, strategy: Strategy, *_: object) -> float:
        return {"AllReduce": 0.9, "DeAR": 1.0}.get(repr(strategy).partition("(")[0], 0.8)

    monkeypatch.setattr(virtual, "seconds", made)
    words = ["--figures", "6", "--models", "resnet50", "--gbit", "10", "--latency-us", "5"]
    monkeypatch.setattr(sys, "argv", ["dear_virtual.py", *words, "--json", str(tmp_path / "a")])
    assert virtual.main() == 1
    printed = capsys.readouterr().out
    assert "MISSED: 6: resnet50, 10 Gbit/s, 5 us: DeAR is 0.900 of the reference" in printed
    assert "ByteScheduler is faster than DeAR: resnet50, 10 Gbit/s, 5 us" in printed


def test_a_latency_below_zero_is_refused(
    virtual: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:  # fmt: skip
    words = ["--latency-us", "-1", "--json", str(tmp_path / "a")]
    monkeypatch.setattr(sys, "argv", ["dear_virtual.py", *words])
    assert virtual.main() == 2
    assert "--latency-us from 0" in capsys.readouterr().err
