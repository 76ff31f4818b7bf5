"""``benchmarks/dear_virtual.py``: Fig. 6 with the paper's workers, in virtual time."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from helpers.scripts import benchmark


@pytest.fixture(scope="module")
def virtual() -> Iterator[ModuleType]:
    with benchmark("dear_virtual") as module:
        yield module


def test_halves_that_hide_under_forward_make_dear_faster(
    virtual: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "out.json"
    words = ["--models", "resnet50", "--workers", "20", "--latency-us", "0", "500"]
    words += ["--gbit", "5", "10"]
    monkeypatch.setattr(sys, "argv", ["dear_virtual.py", *words, "--json", str(path)])
    assert virtual.main() == 0
    kept = json.loads(path.read_text(encoding="utf-8"))
    found = kept["models"]["resnet50"]
    for gbit in (5, 10):
        late, usual = (found[f"{gbit} Gbit/s, {latency} us"] for latency in (500, 0))
        assert late["wfbp"] > usual["wfbp"]
        assert late["faster"] > 1
    assert found["10 Gbit/s, 0 us"]["wfbp"] < found["5 Gbit/s, 0 us"]["wfbp"]
    gains = [float(row[1]) for row in kept["tables"][0]["rows"]]
    assert len(gains) == 4
    assert gains == sorted(gains)
    assert "20 workers in a ring" in kept["tables"][0]["title"]


def test_latency_is_paid_by_every_worker_in_each_half(virtual: ModuleType) -> None:
    """Eqs. 3 and 4: P - 1 latencies in a half, for each of 161 tensors that wait for each other.

    Up to 16 workers exchange small tensors in single rounds.
    """
    few, many = (virtual.seconds("resnet50", "wfbp", workers, 10.0, 1e-3) for workers in (17, 19))
    assert many - few > 161 * 2 * 1e-3


def test_a_dear_that_is_slower_is_missed(
    virtual: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setattr(virtual, "seconds", lambda _m, way, *_: {"wfbp": 0.9, "dear": 1.0}[way])
    words = ["--models", "resnet50", "--latency-us", "5", "--json", str(tmp_path / "a")]
    monkeypatch.setattr(sys, "argv", ["dear_virtual.py", *words])
    assert virtual.main() == 1
    assert "MISSED: 6: resnet50, 10 Gbit/s, 5 us: DeAR is 0.900 of WFBP" in capsys.readouterr().out


def test_a_latency_below_zero_is_refused(
    virtual: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:  # fmt: skip
    words = ["--latency-us", "-1", "--json", str(tmp_path / "a")]
    monkeypatch.setattr(sys, "argv", ["dear_virtual.py", *words])
    assert virtual.main() == 2
    assert "--latency-us from 0" in capsys.readouterr().err
