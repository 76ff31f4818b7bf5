"""What ``benchmarks/canary.py`` judges, and by what."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from helpers.scripts import benchmark

FIRED = [{"dropped": 0, "pulled": 0}, {"dropped": 4, "pulled": 1}]
OURS = "canary:s=18,p=6,colayers=10,compression=sketch"


@pytest.fixture(scope="module")
def canary() -> Iterator[ModuleType]:
    with benchmark("canary") as module:
        yield module


def part(faster: float = 2.0, share: float = 0.2, peaks: tuple[float, float] = (0.5, 0.8)) -> Any:
    def row(seconds: float, sent: float, peak: float) -> dict[str, Any]:
        return {
            "iteration_s": seconds, "bytes_per_iteration": sent, "images_per_s": 1 / seconds,
            "traffic": {"peak": peak},
        }  # fmt: skip

    return {
        "rows": {"bml": row(1.0, 100.0, peaks[1]), OURS: row(1 / faster, 100 * share, peaks[0])}
    }


@pytest.mark.parametrize(
    ("name", "found", "said"),
    [
        ("equal", part(), []),
        ("equal", part(faster=0.99), []),
        ("equal", part(faster=0.97), ["0.97 times as fast as BML; limit 0.98"]),
        ("random", part(faster=1.6), ["1.60 times as fast as BML; limit 1.61"]),
        ("one", part(share=0.31), ["sends 0.31 of BML's bytes; limit 0.3"]),
        ("one", part(peaks=(0.8, 0.8)), ["busiest window 80%, BML's 80%"]),
    ],
)
def test_canary_rows_of_figure_23_are_judged(
    canary: ModuleType, name: str, found: Any, said: list[str]
) -> None:
    missed = canary.judged_23({name: found})
    assert len(missed) == len(said)
    assert all(text in line for text, line in zip(said, missed, strict=True))


def test_the_row_without_staleness_is_shown_and_not_judged(canary: ModuleType) -> None:
    assert canary.BSP == "canary:s=0,colayers=10,compression=sketch,encrypted=False"
    found = part()
    found["rows"][canary.BSP] = found["rows"]["bml"] | {"iteration_s": 1.5}
    assert canary.judged_23({"random": found}) == []


def test_rows_with_options_are_in_the_clear_as_baselines_are(canary: ModuleType) -> None:
    assert all("encrypted=False" in row for row in (canary.CANARY, canary.SIX_BITS, canary.BSP))
    assert "compression=sketch@6," in canary.SIX_BITS


def test_canary_speed_that_does_not_grow_with_workers_is_a_miss(canary: ModuleType) -> None:
    assert canary.judged_20({"2x2": part(2.0), "3x2": part(3.0)}) == []
    (line,) = canary.judged_20({"2x2": part(2.0), "3x2": part(2.0)})
    assert "2 images/s on 3x2, 2x2 had more" in line


def training(
    row: str, seed: int, curve: list[tuple[float, float]], slow: bool = False
) -> dict[str, Any]:
    points = [{"s": s, "accuracy": accuracy} for s, accuracy in curve]
    return {
        "row": row, "seed": seed, "slow": slow, "s": curve[-1][0], "same_weights": True,
        "curve": points, "gradients": 40,
        "fired_by_rank": FIRED if row.startswith("canary") else None,
    }  # fmt: skip


def test_real_training_has_a_row_by_default_and_one_as_published(canary: ModuleType) -> None:
    training = canary.canary_training
    rows = [training.contenders.parse(row.format(s=8)) for row in training.ROWS]
    assert training.ROWS[1] == "canary"
    bounds = [row.strategy.exchange.in_flight for row in rows[1:4]]
    assert bounds == [2, 2, None]


def test_real_training_is_judged_against_bsp_and_by_who_is_first(canary: ModuleType) -> None:
    training_ = canary.canary_training
    runs = [
        training("bml", 0, [(10.0, 90.0), (20.0, 96.0)]),
        training("canary:s=8", 0, [(5.0, 95.6), (11.0, 95.8)]),
        training("ako", 0, [(9.0, 95.0), (18.0, 95.9)]),
    ]
    rows = training_.summary(runs, 95.5)
    assert [row["to_target_s"] for row in rows] == [20.0, 5.0, 18.0]
    assert rows[1]["gap"] == pytest.approx(-0.2)
    assert [row["fired_by_rank"] for row in rows] == [None, FIRED, None]
    assert training_.judged_19({"2x2": {"rows": rows}}) == []
    runs[1] = training("canary:s=8", 0, [(5.0, 95.0), (19.0, 95.6)])
    (line,) = training_.judged_19({"2x2": {"rows": training_.summary(runs, 95.5)}})
    assert "19.0 s to the target; ako 18.0 s" in line
    runs[1] = training("canary:s=8", 0, [(5.0, 95.0), (10.0, 95.4)])
    lines = training_.judged_19({"2x2": {"rows": training_.summary(runs, 95.5)}})
    assert "0.60 points below BSP; limit 0.5" in lines[0]


def test_rows_that_are_there_last_stand_first_with_what_the_rule_dropped(
    canary: ModuleType,
) -> None:
    training_ = canary.canary_training
    runs = [
        training("bml", 0, [(10.0, 90.0), (20.0, 96.0)]),
        training("bml", 1, [(10.0, 90.0), (22.0, 97.0)]),
        training("canary", 0, [(5.0, 95.6), (11.0, 95.8)]),
        training("canary", 1, [(5.0, 94.0), (11.0, 94.2)]),
    ]
    part = {"rows": training_.summary(runs, 95.5), "lab": "bcube:2x2@50mbit", "target": 95.5}
    made = training_.table("19", "2x2", part | {"length": 20})
    assert "digits to 95.5%, 4 workers on bcube:2x2@50mbit, real pace, 2 seeds of 20" in made.title
    assert made.rows == (
        ("canary", "95.00", "94.20 .. 95.80", "-1.50", "", "5.0 .. 5.0", "1", "11.0", "8 of 80",
         "2"),
        ("bml", "96.50", "96.00 .. 97.00", "+0.00", "21.0", "20.0 .. 22.0", "0", "21.0", "", ""),
    )  # fmt: skip


def measured_part(seconds: dict[str, float]) -> dict[str, Any]:
    rows = {
        row: {
            "iteration_s": each, "quantiles_s": {"p10": each / 2, "p90": each * 2},
            "images_per_s": 100 / each, "bytes_per_iteration": 2e6,
            "traffic": {"mean": 0.25, "peak": 0.5}, "limited_by_cores": row == "ako",
            "gradients": 96, "fired_by_rank": FIRED if row.startswith("canary") else None,
        }
        for row, each in seconds.items()
    }  # fmt: skip
    config = {"stretch": 8.0, "model": "paced:vgg19_v100@0.05", "lab": "bcube:2x2@10gbit"}
    return {"rows": rows, "configs": [config | {"iterations": 6}]}


def test_both_paces_stand_in_a_row_and_what_is_behind_first(canary: ModuleType) -> None:
    part = measured_part({"bml": 4.0, "canary": 2.0, "ako": 3.0})
    part["real"] = measured_part({"bml": 1.0, "canary": 1.25, "ako": 1.5})
    made = canary.table("23", "equal", part)
    assert "slow motion of 8 and real pace, 6 iterations" in made.title
    assert made.rows[1] == (
        "canary", "0.80", "2.00", "80", "50", "2.000", "1.000 .. 4.000", "2.00", "1.000", "25",
        "50", "4 of 100", "4 of 100",
    )  # fmt: skip
    assert made.rows[0][-2:] == ("", "")
    assert made.notes[0] == "behind: canary takes 1.25 times as long as BML, real pace"
    assert any("grows with the model takes 160 times as long" in line for line in made.notes)
    assert made.notes[-1] == "limited by this machine's cores, slow motion: ako"


def test_the_same_benches_run_at_real_pace(
    canary: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["canary.py"])
    args = canary.arguments()
    bench, star = canary.benches(args, "2x2", "equal")
    assert bench.strategies[2] == "canary:s=8,p=6,colayers=10,compression=sketch,encrypted=False"
    real = canary.at_real_pace([bench, star])
    assert [each.stretch for each in real] == [1.0, 1.0]
    assert real[0].strategies == bench.strategies
    assert canary.at_real_pace(real) == []
