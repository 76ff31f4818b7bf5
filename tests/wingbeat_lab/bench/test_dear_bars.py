"""``benchmarks/dear_figures.py``: what it asks the bench for, what it draws, and how it judges."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from helpers.scripts import benchmark
from wingbeat import AllReduce
from wingbeat.errors import UsageError
from wingbeat_lab import paced
from wingbeat_lab.bench.measure import Quantiles


@pytest.fixture(scope="module")
def figures() -> Iterator[ModuleType]:
    with benchmark("dear_figures") as module:
        yield module


def arguments(
    figures: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str
) -> argparse.Namespace:
    monkeypatch.setattr(sys, "argv", ["dear_figures.py", *words])
    parsed: argparse.Namespace = figures.arguments()
    return parsed


def group(**speeds: float) -> dict[str, Any]:
    return {
        "bars": {
            name: {
                "speed": speed,
                "iteration_s": {"median": 1 / speed},
                "limited_by_cores": False,
            }
            for name, speed in speeds.items()
        }
    }


@pytest.mark.parametrize("figure", ["6", "7", "9", "11"])
def test_every_bar_of_every_model_is_a_row_that_can_be_measured(
    figures: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, figure: str
) -> None:
    args = arguments(figures, monkeypatch)
    planned = figures.benches(figure, args, tmp_path)
    about = figures.BARS[figure]
    each = len(about.models) * (len(args.batches) if figure == "11" else 1)
    assert len(planned) == each * len(about.rates)
    for _, _, bench in planned:
        checked = bench.check()
        assert len(checked.rows) == len(about.rows)
        assert checked.lab.rate <= 500e6


def test_what_is_tuned_is_tuned_for_both_schedules(
    figures: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    args = arguments(figures, monkeypatch, "--trials", "4", "--steps", "3", "--models", "resnet50")
    [(_, _, bench), _] = figures.benches("9", args, tmp_path)
    rows = dict(zip(figures.BARS["9"].rows, bench.check().rows, strict=True))
    for bar, schedule in (("Horovod-BO", "wfbp"), ("DeAR-BO", "dear")):
        made = rows[bar].strategy
        assert made.schedule.name == schedule
        assert (made.plan.search, made.plan.trials, made.plan.steps) == ("bo", 4, 3)
    assert rows["MG-WFBP"].strategy.plan.merging().rule == "wfbp"
    assert [name for name, row in rows.items() if row.decides] == [
        "Horovod-BO",
        "MG-WFBP",
        "DeAR-BO",
    ]


def test_a_smaller_batch_takes_less_computation_and_sends_as_much(
    figures: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    args = arguments(figures, monkeypatch, "--batches", "16", "64", "--models", "resnet50")
    small, usual = figures.benches("11", args, tmp_path)
    assert [name for _, name, _ in (small, usual)] == ["resnet50, 16", "resnet50, 64"]
    one, four = (paced.parse(bench.model) for _, _, bench in (small, usual))
    assert four.forward_ms == pytest.approx(4 * one.forward_ms)
    assert four.forward_ms == pytest.approx(paced.load_profile("resnet50").forward_ms, rel=1e-3)
    assert one.params == four.params
    assert small[2].lab == usual[2].lab


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--rows", "Horovud"], "'Horovud': allowed: ByteScheduler, DeAR"),
        (["--models", "resnet5"], "'resnet50'"),
        (["--workers", "1"], "--workers: allowed are 2 or more"),
        (["--figures", "11", "--batches", "0"], "--batches: 1 or more"),
        (["--figures", "9", "--trials", "0"], "trials=0"),
        (["--figures", "5", "--sizes-kb", "0"], "allowed are values > 0"),
        (["--figures", "5", "--halves-lab", "sta:4@1gbit"], "'sta'"),
        (["--json", "/proc/none/out.json"], "/proc/none/out.json"),
        (["--png", "/proc/none/pictures"], "/proc/none"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    figures: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    words: list[str],
    named: str,
) -> None:
    file = [] if "--json" in words else ["--json", str(tmp_path / "out.json")]
    monkeypatch.setattr(sys, "argv", ["dear_figures.py", *file, *words])
    monkeypatch.setattr(figures.runner, "run", lambda *_, **__: pytest.fail("it started"))
    monkeypatch.setattr(figures.dear_halves.lab, "run", lambda *_, **__: pytest.fail("it started"))
    assert figures.main() == 2
    assert named in capsys.readouterr().err


def test_rows_that_were_asked_for_stand_beside_the_first(
    figures: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = arguments(figures, monkeypatch, "--rows", "DeAR", "DeAR-BO")
    assert list(figures.rows_of("7", args)) == ["Horovod's", "DeAR"]
    assert list(figures.rows_of("9", args)) == ["Horovod-FB", "DeAR-BO"]
    with pytest.raises(UsageError):
        figures.rows_of("7", arguments(figures, monkeypatch, "--rows", "dear"))


def test_dear_must_be_the_fastest_within_one_per_cent(figures: ModuleType) -> None:
    near = {"7": {"slow": {"a": group(first=1.0, DDP=1.009, DeAR=1.0)}}}
    assert figures.judged(near) == []
    behind = {"7": {"slow": {"a": group(first=1.0, DDP=1.1, DeAR=1.0)}}}
    assert figures.judged(behind) == ["7: slow a: DeAR is 0.909 of DDP; limit 1 within 1%"]
    tuned = {"9": {"fast": {"a": group(first=1.2, **{"DeAR-FB": 1.0, "DeAR-BO": 1.1})}}}
    assert len(figures.judged(tuned)) == 1
    assert figures.judged({"9": {"fast": {"a": group(first=1.2, other=1.3)}}}) == []


def test_where_dear_is_behind_stands_first_below_the_table(figures: ModuleType) -> None:
    groups = {"a": group(first=1.0, DDP=1.1, DeAR=1.0), "b": group(first=1.0, DDP=0.9, DeAR=1.0)}
    for each in groups.values():
        for bar in each["bars"].values():
            bar["deciding"] = None
    lines = figures.notes(figures.BARS["7"], "slow", groups)
    assert lines[:3] == [
        "behind: a: DDP is 1.100 times as fast as DeAR",
        "DeAR over first: 1.000 to 1.000, 1.000 on average",
        "DeAR over DDP: 0.909 to 1.111, 1.010 on average",
    ]


def test_two_halves_cost_no_more_than_the_whole(figures: ModuleType) -> None:
    def row(kb: float, rsag: float) -> dict[str, Any]:
        return {"kb": kb, "ms": {"all_reduce": 1.0, "rsag": rsag}}

    assert figures.judged({"5": {"rows": [row(4, 1.05), row(1024, 1.04)]}}) == []
    [line] = figures.judged({"5": {"rows": [row(2048, 1.06)]}})
    assert line == "5: 2048 KB: both halves take 1.060 of an all-reduce; limit 1.05"


def test_dear_bars_small_halves_have_the_same_limit(figures: ModuleType) -> None:
    """The paper says so of both; what small ones cost is what Fig. 6 is about."""
    rows = [{"kb": 4, "ms": {"all_reduce": 1.0, "rsag": 1.34}}]
    assert len(figures.judged({"5": {"rows": rows}})) == 1


def test_all_reduces_have_the_buckets_that_a_user_would_have(
    figures: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    args = arguments(figures, monkeypatch)
    for figure, bar in (("7", "Horovod's"), ("9", "Horovod-FB"), ("11", "Horovod's")):
        [(_, _, bench), *_] = figures.benches(figure, args, tmp_path)
        row = dict(zip(figures.BARS[figure].rows, bench.check().rows, strict=True))[bar]
        usual = AllReduce().plan.fusion().first_bytes
        assert row.strategy.plan.fusion().first_bytes == pytest.approx(usual * 0.05, abs=1)


def test_what_the_search_gains_is_seen_beside_its_start(figures: ModuleType) -> None:
    assert figures.BARS["9"].rows["DeAR, 25 MB"] == "dear:plan=fixed"


def test_error_bars_reach_from_the_slowest_to_the_fastest_tenth(figures: ModuleType) -> None:
    bar = {"speed": 1.2, "iteration_s": {"median": 1.0, "p10": 0.8, "p90": 1.5}}
    assert figures.error_bar(bar) == pytest.approx((0.4, 0.3))


def test_what_is_measured_is_shown_kept_and_drawn(
    figures: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    times = {"ddp": 1.0, "allreduce": 1.1, "mgwfbp": 1.0, "dear": 0.8}

    def run(config: Any, **_: Any) -> Any:
        runs = []
        for text in config.strategies:
            seconds = times[text.partition(":")[0]]
            quantiles = Quantiles(median=seconds, p10=seconds, p90=seconds)
            runs.append(
                SimpleNamespace(
                    strategy=text,
                    iteration_s=quantiles,
                    limited_by_cores=text == "mgwfbp",
                    merge=None,
                    deciding=None,
                )
            )
        return SimpleNamespace(
            report=SimpleNamespace(runs=runs, machine={"load_before": [0.0, 0.0, 0.0]})
        )

    path = tmp_path / "made" / "out.json"
    words = ["--figures", "7", "--models", "resnet50", "--json", str(path), "--png", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["dear_figures.py", *words])
    monkeypatch.setattr(figures.runner, "run", run)
    assert figures.main() == 0
    shown = capsys.readouterr().out
    assert "DeAR over Horovod's: 1.375 to 1.375, 1.375 on average" in shown
    assert "DeAR over PyTorch-DDP: 1.250 to 1.250" in shown
    assert "paper: DeAR 1.06 to 1.83 over the others" in shown
    assert "slow motion of 3, 8 iterations" in shown
    assert "resnet50, MG-WFBP: limited by this machine's cores" in shown
    whole = json.loads(path.read_text(encoding="utf-8"))
    assert len(whole["tables"]) == 2
    bar = ["resnet50, DeAR", "dear:plan=fixed,edge_mb=1", "1.000", "1.375", "800", "800 .. 800"]
    assert bar in whole["tables"][0]["rows"]
    kept = whole["7"]
    assert kept["fast"]["resnet50"]["bars"]["DeAR"]["speed"] == pytest.approx(1.375)
    assert (tmp_path / "dear_fig7.png").read_bytes()[:4] == b"\x89PNG"


def test_halves_are_shown_and_drawn_by_size(figures: ModuleType, tmp_path: Path) -> None:
    ms = {"gloo": 4.0, "all_reduce": 5.0, "reduce_scatter": 2.0, "all_gather": 2.2, "rsag": 4.1}
    rows = [
        {
            "kb": kb,
            "ms": {way: kb * value for way, value in ms.items()},
            "samples_s": {way: [1e-3 * kb * value] * 3 for way, value in ms.items()},
        }
        for kb in (4, 64)
    ]
    rows[0]["ms"]["rsag"] = 26.0
    made = figures.dear_halves.table("star:4@500mbit", rows)
    assert "star:4@500mbit, real pace, median of 3 turns" in made.title
    assert made.rows[0][:6] == ("4", "1.300", "0.400", "0.440", "26.00", "16.40 .. 16.40")
    assert made.rows[1][6:] == ("320.00", "320.00 .. 320.00", "256.00", "256.00 .. 256.00")
    assert made.notes[:2] == (
        "both halves: at worst 1.300 times an all-reduce (4 KB)",
        "an all-reduce: at worst 1.250 times Gloo's (64 KB)",
    )
    figures.draw("5", {"lab": "star:4@500mbit", "rows": rows}, tmp_path / "five.png")
    assert (tmp_path / "five.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.lab
@pytest.mark.slow
def test_dear_bars_halves_are_measured(
    figures: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ["--figures", "5", "--halves-lab", "star:2@500mbit", "--sizes-kb", "4", "64"]
    words += ["--halves-rounds", "1", "--halves-seconds", "0.01", "--json", str(tmp_path / "a")]
    args = arguments(figures, monkeypatch, *words)
    report: dict[str, Any] = {}
    figures.fill(args, report)
    assert [row["kb"] for row in report["5"]["rows"]] == [4, 64]
    for row in report["5"]["rows"]:
        assert set(row["ms"]) == set(figures.dear_halves.WAYS)
        assert all(0 < value < 60_000 for value in row["ms"].values())
