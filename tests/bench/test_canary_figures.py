"""What ``benchmarks/canary.py`` judges, and by what."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from helpers.scripts import benchmark

FIRED = [{"dropped": 0, "pulled": 0}, {"dropped": 4, "pulled": 1}]
OURS = "canary:s=18,p=6,colayers=10,wire=sketch"


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
def test_figure_23_is_judged(canary: ModuleType, name: str, found: Any, said: list[str]) -> None:
    missed = canary.judged_23({name: found})
    assert len(missed) == len(said)
    assert all(text in line for text, line in zip(said, missed, strict=True))


def test_the_row_without_staleness_is_shown_and_not_judged(canary: ModuleType) -> None:
    assert canary.BSP == "canary:s=0,colayers=10,wire=sketch,encrypted=False"
    found = part()
    found["rows"][canary.BSP] = found["rows"]["bml"] | {"iteration_s": 1.5}
    assert canary.judged_23({"random": found}) == []


def test_default_rows_are_in_the_clear_as_baselines_are(canary: ModuleType) -> None:
    assert all("encrypted=False" in row for row in (canary.CANARY, canary.SIX_BITS, canary.BSP))
    assert "wire=sketch@6," in canary.SIX_BITS


def test_speed_has_to_grow_with_workers(canary: ModuleType) -> None:
    assert canary.judged_20({"2x2": part(2.0), "3x2": part(3.0)}) == []
    (line,) = canary.judged_20({"2x2": part(2.0), "3x2": part(2.0)})
    assert "2 images/s on 3x2, 2x2 had more" in line


def training(row: str, seed: int, slow: bool, curve: list[tuple[float, float]]) -> dict[str, Any]:
    points = [{"s": s, "accuracy": accuracy} for s, accuracy in curve]
    return {
        "row": row, "seed": seed, "slow": slow, "s": curve[-1][0], "same_weights": True,
        "curve": points, "fired_by_rank": FIRED if row.startswith("canary") else None,
    }  # fmt: skip


def test_real_training_has_a_row_as_published(canary: ModuleType) -> None:
    training = canary.canary_training
    rows = [training.contenders.parse(row.format(s=8)) for row in training.ROWS]
    bounds = [row.strategy.exchange.in_flight for row in rows[1:3]]
    assert bounds == [2, None]


def test_real_training_is_judged_against_bsp(
    canary: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [
        training("bml", 0, True, [(10.0, 90.0), (20.0, 96.0)]),
        training("canary:s=8", 0, True, [(5.0, 95.6), (11.0, 95.8)]),
        training("ako", 0, True, [(9.0, 95.0), (18.0, 95.9)]),
    ]
    rows = canary.canary_training.summary(runs)
    assert [row["to_target_s"] for row in rows] == [20.0, 5.0, 18.0]
    assert rows[1]["gap"] == pytest.approx(-0.2)
    assert [row["fired_by_rank"] for row in rows] == [None, FIRED, None]
    canary.canary_training.show("19", rows)
    assert "dropped 4 iterations of 1 worker; parameters pulled: 1" in capsys.readouterr().out
    assert canary.canary_training.judged_19({"2x2": {"rows": rows}}) == []
    runs[1] = training("canary:s=8", 0, True, [(5.0, 95.0), (19.0, 95.6)])
    (line,) = canary.canary_training.judged_19(
        {"2x2": {"rows": canary.canary_training.summary(runs)}}
    )
    assert "19.0 s to BSP's; ako 18.0 s" in line
    runs[1] = training("canary:s=8", 0, True, [(5.0, 95.0), (10.0, 95.4)])
    lines = canary.canary_training.judged_19(
        {"2x2": {"rows": canary.canary_training.summary(runs)}}
    )
    assert "0.60 points below BSP; limit 0.5" in lines[0]
