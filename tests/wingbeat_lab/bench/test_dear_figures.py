"""``benchmarks/dear.py``: what it asks the bench for, and how it judges."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from helpers.scripts import benchmark
from wingbeat_lab import paced
from wingbeat_lab.bench.measure import Measured


@pytest.fixture(scope="module")
def dear() -> Iterator[ModuleType]:
    with benchmark("dear") as module:
        yield module


def arguments(dear: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str) -> argparse.Namespace:
    monkeypatch.setattr(sys, "argv", ["dear.py", *words])
    parsed: argparse.Namespace = dear.arguments()
    return parsed


def models(ratio: float = 0.9, **fractions: float) -> dict[str, Any]:
    return {
        name: {
            "judged": "dear",
            "rows": {
                "ddp": {"fraction": 0.1, "ratio": 1.0},
                "dear": {"fraction": value, "ratio": ratio},
            },
        }
        for name, value in fractions.items()
    }


def test_the_rates_keep_the_papers_ratio(dear: ModuleType) -> None:
    # 3/4 of the bytes at this rate take as long as 63/64 of them at 10 Gbit/s.
    rate = float(dear.host_rate(10.0, 4).removesuffix("mbit")) * 1e6
    assert 0.75 / rate == pytest.approx(63 / 64 / 10e9, rel=1e-3)


def test_limits_are_judged_by_average_and_by_model(dear: ModuleType) -> None:
    assert dear.summary("slow", models(a=0.99, b=0.93))["missed"] == []
    [line] = dear.summary("slow", models(a=0.99, b=0.99, c=0.89))["missed"]
    assert line == "slow: S/S_max of c is 0.890; limit 0.9"
    made = dear.summary("fast", models(a=0.95, b=0.89))
    assert made["worst"] == {"model": "b", "fraction": 0.89}
    assert made["missed"] == ["fast: S/S_max is 0.920 on average; limit 0.93"]


def test_it_must_not_be_slower_than_the_first_row(dear: ModuleType) -> None:
    assert dear.summary("fast", models(ratio=1.0, a=0.99))["missed"] == []
    [line] = dear.summary("fast", models(ratio=1.25, a=0.99))["missed"]
    assert line == "fast: a is 0.800x the first row; limit 1.0"
    assert dear.summary("even", models(ratio=0.8, a=0.1))["missed"] == []
    assert len(dear.summary("even", models(ratio=0.81, a=0.1))["missed"]) == 1


def test_even_network_rate_makes_all_gathers_last_two_forwards(dear: ModuleType) -> None:
    profile = paced.load_profile("resnet50")
    nbytes = 4 * sum(layer.numel for layer in profile.layers)
    gather_s = 63 / 64 * nbytes * 8 / (dear.even_gbit("resnet50") * 1e9)
    assert gather_s == pytest.approx(2e-3 * profile.forward_ms)


def test_links_stay_slow_enough_for_two_cores(
    dear: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = arguments(dear, monkeypatch)
    for rate in ("slow", "fast", "fitted"):
        benches = dear.configs(rate, args, {"": 10.0, "bert_base": 5.0})
        assert tuple(benches) == dear.MODELS
        for name, config in benches.items():
            assert config.check().lab.rate <= 500e6
            mb = 5 if name == "bert_base" else 10
            assert config.strategies == ("ddp", f"dear:plan=fixed,mb={mb}")


def test_bucket_sizes_by_model_are_parsed(dear: ModuleType) -> None:
    assert dear.bucket_sizes(["10", "bert_large=2.5"]) == {"": 10.0, "bert_large": 2.5}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--mb", "bert_lrge=3"], "'bert_large'"),
        (["--mb", "resnet50=ten"], "'ten'"),
        (["--models", "resnet5"], "'resnet50'"),
        (["--rows", "ddp"], "needs a row of dear"),
        (["--workers", "1"], "2 or more"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    dear: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    named: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["dear.py", *words])
    monkeypatch.setattr(dear.runner, "run", lambda *_, **__: pytest.fail("it started"))
    assert dear.main() == 2
    assert named in capsys.readouterr().err


def measured(forward: float, half: float) -> Measured:
    halves = max(forward, half) + max(2 * forward, half)
    whole = 4 * 3 * forward / halves
    return Measured(4, 1, 1, forward, 2 * forward, half, half, halves, whole, {}, {})


@pytest.mark.parametrize(
    ("half", "case", "gain"),
    # Eq. 8 over Eq. 7 with t_ff = 1: 3 / 3, 4 / 3.5, and 11 / 10.
    [(0.5, 1, 1.0), (1.5, 2, 4 / 3.5), (2.0, 2, 5 / 4), (5.0, 3, 11 / 10)],
)
def test_equation_9_says_what_can_be_gained(
    dear: ModuleType, half: float, case: int, gain: float
) -> None:
    found = dear.eq9(measured(1.0, half))
    assert found["case"] == case
    assert found["gain"] == found["general"] == pytest.approx(gain)


def test_equation_9_says_nothing_where_backward_is_not_twice_forward(dear: ModuleType) -> None:
    # As on bert_large_dear: a gather outlasts forward, and backward hides a whole all-reduce.
    alone = Measured(64, 1, 1, 0.0116, 0.3889, 0.1059, 0.1059, 0.4948, 51.8, {}, {})
    found = dear.eq9(alone)
    assert found["case"] is found["gain"] is None
    assert found["general"] == pytest.approx(0.4005 / 0.4948)


def found(ddp_ratio: float = 1.0, **more: Any) -> dict[str, Any]:
    """What one model's bench says, of DDP and DeAR."""
    times = {"median": 0.5, "p10": 0.4, "p90": 0.6}
    usual = {"iteration_s": times, "limited_by_cores": False}
    ddp = {"fraction": 0.9, "of_line": 0.861, "ratio": ddp_ratio, "speedup": 3.0}
    ours = {"fraction": 0.97, "of_line": 0.928, "ratio": 0.93, "speedup": 3.2}
    rows = {
        "ddp": ddp | usual | {"ratio_to_best_ddp": 1.0},
        "dear": ours | usual | {"ratio_to_best_ddp": 0.95},
    }
    own = {"s_max": 3.3, "s_max_of_line": 3.4, "measured": {"workers": 4}, "rows": rows}
    own |= {"lab": "star:4@476mbit", "judged": "dear", "ceiling": 0.99, "real": None}
    own |= {"config": {"stretch": 8.0, "iterations": 6}}
    return own | {"eq9": {"case": 2, "gain": 1.1, "general": 1.2}} | more


def test_the_papers_table_stands_beside_ours(dear: ModuleType) -> None:
    other = found(eq9={"case": None, "gain": None, "general": 0.8})
    models = {"bert_large_dear": found(), "vgg16": other}
    results = {"models": models, "average": 0.97, "worst": {"model": "vgg16", "fraction": 0.97}}
    made = dear.table("fast", results)
    assert "4 workers on star:4@476mbit, slow motion of 8 and real pace, 6 iterations" in made.title
    # S_max / P and S / S_max: ours, and 51.8 / 64 and 72.3% of table II.
    first = ("0.850", "0.825", "0.809", "1.100 (2)", "1.200")
    second = ("0.850", "0.825", "", "", "0.800")
    ms = ("500", "400 .. 600")
    ddp = (*ms, "0.750", "0.861", "0.900", "1.000", "0.861", "0.900", "", "", "1.000", "1.000")
    own_row = (*ms, "0.800", "0.928", "0.970", "0.950", "0.928", "0.970")
    ends = ("0.990", "0.950", "0.930")
    assert made.rows == (
        ("bert_large_dear, ddp", *first, *ddp),
        ("bert_large_dear, dear", *first, *own_row, "0.723", *ends),
        ("vgg16, ddp", *second, *ddp),
        ("vgg16, dear", *second, *own_row, "", *ends),
    )


def test_real_pace_stands_in_the_same_row_and_what_is_behind_first(dear: ModuleType) -> None:
    real = found(ddp_ratio=0.62)
    real["rows"]["dear"] |= {"of_line": 0.7, "fraction": 0.75, "ratio_to_best_ddp": 1.5}
    real["rows"]["ddp"]["limited_by_cores"] = True
    models = {"vgg16": found(real=real)}
    results = {"models": models, "average": 0.97, "worst": {"model": "vgg16", "fraction": 0.97}}
    made = dear.table("slow", results)
    cells = dict(zip(made.columns, made.rows[1], strict=True))
    assert cells["real pace: S / S_max by the line rate"] == "0.700"
    assert cells["real pace: S / S_max"] == "0.750"
    assert cells["real pace: time, of the best DDP's"] == "1.500"
    assert cells["S / S_max"] == "0.970"
    assert made.notes[:2] == (
        "behind: vgg16, real pace: dear takes 1.500 times as long as ddp",
        "limited by this machine's cores: vgg16, real pace: ddp",
    )


def test_real_pace_is_the_same_bench_without_slow_motion(
    dear: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dear.configs("slow", arguments(dear, monkeypatch), {})["resnet50"]
    real = dear.at_real_pace(config)
    assert (real.stretch, real.strategies, real.lab) == (1.0, config.strategies, config.lab)
    assert dear.at_real_pace(real) is None


def test_dear_figures_are_written_to_a_file(dear: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "new" / "dear.json"
    dear.write(path, {"rates": {"slow": dear.summary("slow", models(a=0.99))}})
    assert json.loads(path.read_text(encoding="utf-8"))["rates"]["slow"]["average"] == 0.99


def test_no_schedule_beats_the_ceiling_that_knows_layers(
    dear: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = arguments(dear, monkeypatch)
    checked = dear.configs("slow", args, {})["bert_base"].check()
    nbytes = checked.model.profile.nbytes
    second = nbytes * 0.75 / (checked.lab.rate / 8)
    alone = Measured(4, nbytes, 1, 0.09, 0.18, second, second, 1.0, 1.0, {}, {})
    value = dear.ceiling(checked, alone)
    # BERT's word embedding, a fifth of all bytes, is the last gradient to be ready.
    assert 0.9 < value < 0.95
