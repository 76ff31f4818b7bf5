"""What ``benchmarks/ripples.py`` judges, and by what."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from helpers.scripts import benchmark
from wingbeat.errors import UsageError

ADPSGD = "adpsgd:overlap=False,encrypted=False"


@pytest.fixture(scope="module")
def ripples() -> Iterator[ModuleType]:
    with benchmark("ripples") as module:
        yield module


def part(smart: float, ddp: float, ours: float, adpsgd: float = 5.0) -> Any:
    seconds = {"ddp": ddp, "allreduce": ours, ADPSGD: adpsgd, "ripples:policy=smart": smart}
    return {"rows": {row: {"iteration_s": s} for row, s in seconds.items()}}


@pytest.mark.parametrize(
    ("report", "said"),
    [
        ({"17": {"0": part(1.0, 1.2, 1.1)}}, []),
        ({"17": {"0": part(1.0, 1.2, 1.09)}}, ["1.09 times All-Reduce; limit 1.1"]),
        ({"17": {"0": part(1.0, 1.2, 1.2, 4.2)}}, ["4.20 times AD-PSGD; limit 4.3"]),
        ({"17": {"0": part(1.0, 1.2, 1.2)}, "19": {"2": part(1.1, 3.0, 3.0)}}, []),
        ({"19": {"2": part(1.0, 3.0, 2.5)}}, ["+2x: 2.50 times All-Reduce; limit 2.55"]),
        (
            {"17": {"0": part(1.0, 1.2, 1.2)}, "19": {"5": part(1.5, 9.0, 9.0)}},
            ["+5x: keeps 67%; limit 70%"],
        ),
    ],
)
def test_figures_17_and_19_are_judged(ripples: ModuleType, report: Any, said: list[str]) -> None:
    missed = ripples.judged(report)
    assert len(missed) == len(said)
    assert all(text in line for text, line in zip(said, missed, strict=True))


def test_a_normal_iteration_has_to_be_known(ripples: ModuleType) -> None:
    with pytest.raises(UsageError, match="measure 17 first"):
        ripples.normal(argparse.Namespace(normal=None, figures=["19"]))
    assert ripples.normal(argparse.Namespace(normal=0.5)) == 0.5


def test_a_slow_worker_sleeps_normal_iterations(ripples: ModuleType) -> None:
    args = argparse.Namespace(
        hosts=2, per_host=2, rate="1gbit", model="vgg16_cifar_1080ti", scale=0.1, stretch=10.0,
        iterations=4, rounds=1, warmup=1,
    )  # fmt: skip
    made = ripples.config(args, ("ddp",), sleep_s=0.3)
    (slow,) = made.check().slow
    assert slow.rank == 1
    # Forward and backward of 128 images at 41,680 a second, ten times slower.
    assert slow.factor * 10 * 128 / 41680 == pytest.approx(0.3, rel=1e-3)


def run(row: str, accuracy: float, losses: list[tuple[float, float]]) -> dict[str, Any]:
    made = [(s, loss, number % 2) for number, (s, loss) in enumerate(losses)]
    return {
        "row": row, "accuracy": accuracy, "s": 9.0, "workers": 2, "losses": made,
        "iterations": len(losses) / 2, "same_weights": True,
    }  # fmt: skip


def test_iterations_of_ad_psgd_are_those_of_its_active_workers(ripples: ModuleType) -> None:
    """Rank 1 is passive and makes three steps for each of rank 0's."""
    training = ripples.ripples_training
    losses = [(0.1 * n, 1.0 if n <= 40 else 0.0, int(n % 4 > 0)) for n in range(1, 121)]
    assert training.reached(losses, [0, 1], 0.5) == (pytest.approx(5.1), 25.5)
    # Six of rank 0's last ten losses are low with its 16th step, the 64th of all.
    assert training.reached(losses, training.counting("adpsgd", 2), 0.5) == (
        pytest.approx(6.4),
        16.0,
    )
    assert ripples.longer_by_active("adpsgd", [10, 30]) == 2.0
    assert ripples.longer_by_active("ripples:policy=smart", [10, 30]) == 1.0


def test_within_one_host_nothing_is_divided_by_the_slow_motion(
    ripples: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def measured(config: Any, **_: Any) -> Any:
        asked.append(config)
        found = SimpleNamespace(measured=SimpleNamespace(t_rs_s=1.0, t_ag_s=1.0), compute_s={})
        return SimpleNamespace(report=found)

    monkeypatch.setattr(ripples.runner, "run", measured)
    args = argparse.Namespace(
        hosts=4, per_host=2, rate="1gbit", model="vgg16_cifar_1080ti", scale=0.1, stretch=10.0,
        iterations=4, rounds=1, warmup=1,
    )  # fmt: skip
    ((_, part),) = ripples.placement(args)
    found = {name: own["all_reduce_s"] for name, own in part["rows"].items()}
    assert found == {"1 x 2": [2.0], "2 x 1": [0.2], "4 x 1": [0.2], "4 x 2": [0.2]}
    made = ripples.table_15(part)
    assert made.rows[0] == ("1 x 2", "2000.00", "2000.00 .. 2000.00", "0.00")
    assert made.notes == ("order: not the paper's: it has 1 x 2 (here 2) before 4 x 2 (0.2)",)
    assert (asked[0].lab, asked[0].model, asked[0].stretch) == (
        "loopback:2", "paced:vgg16_cifar_1080ti", 1.0,
    )  # fmt: skip


def test_training_is_judged_by_accuracy_and_timed_to_a_loss(ripples: ModuleType) -> None:
    training = ripples.ripples_training
    falling = [(0.1 * number, 1.0 if number <= 30 else 0.0) for number in range(1, 61)]
    runs = [run("allreduce", 98.0, falling), run("ripples:policy=smart", 97.4, falling[:30])]
    first, second = training.summary(runs, 0.5)
    # More than ten of the last twenty steps are low with the 41st; an iteration is two steps.
    assert first["to_loss_s"] == pytest.approx(4.1)
    assert first["to_loss_iterations"] == 20.5
    assert (first["iterations"], second["iterations"]) == (30, 15)
    assert second["to_loss_s"] is None
    (line,) = training.judged({"0": {"rows": [first, second]}})
    assert "0.60 points below; limit 0.5" in line


def test_a_table_says_where_rows_are_in_another_order_than_the_papers(ripples: ModuleType) -> None:
    seconds = {"ddp": 2.0, "allreduce": 1.5, ADPSGD: 4.0, "ripples:policy=paper": 1.6}
    seconds["ripples:policy=smart"] = 1.0  # ours has no place in the paper
    rows = {
        row: {
            "iteration_s": s, "by_all_s": s, "spread_s": [s - 0.5, s + 0.5], "synchronising": 0.5,
            "bytes_per_iteration": 1e6, "steps_by_rank": None, "limited_by_cores": False,
        }
        for row, s in seconds.items()
    }  # fmt: skip
    part = {"title": "17: equal workers", "rows": rows, "config": {"stretch": 1.0}}
    made = ripples.table(part)
    assert made.rows[0][:3] == ("ddp", "2.000", "1.500 .. 2.500")
    assert made.notes[1:] == (
        "order: not the paper's: it has smart groups (here 1.6) before All-Reduce (1.5)",
    )
    rows["ripples:policy=paper"] |= {"iteration_s": 1.4, "by_all_s": 1.4}
    assert ripples.table(part).notes[1:] == (
        "order: the paper's, of smart groups, All-Reduce, AD-PSGD",
    )


def test_training_is_compared_with_the_papers_order(ripples: ModuleType) -> None:
    training = ripples.ripples_training

    def rows(**figures: float | None) -> list[dict[str, Any]]:
        return [
            {"row": f"ripples:policy={name}", "accuracy": value, "to_loss_iterations": value}
            for name, value in figures.items()
        ]

    assert training.order("18", rows(random=10, paper=11, static=12)) == [
        "order: the paper's, of random groups, smart groups, static groups"
    ]
    # Who never gets there is behind who does.
    assert training.order("18", rows(paper=None, static=12)) == [
        "order: not the paper's: it has smart groups (here inf) before static groups (12)"
    ]
    assert training.order("20", rows(paper=92.0, static=96.5)) == [
        "order: not the paper's: it has smart groups (here 92) before static groups (96.5)"
    ]
    assert training.order("20", rows(paper=97.0, static=96.5)) == [
        "order: the paper's, of smart groups, static groups"
    ]
    assert training.order("18", rows(smart=1.0, static=2.0)) == []
    assert training.order("18", rows(paper=None, static=None)) == []


def test_trainings_have_the_median_and_the_spread_of_seeds(ripples: ModuleType) -> None:
    training = ripples.ripples_training
    falling = [(0.1 * number, 1.0 if number <= 30 else 0.0) for number in range(1, 61)]
    runs = [run("allreduce", each, falling) for each in (90.0, 96.0, 97.0)]
    part = {"title": "18: digits", "rows": training.summary(runs, 0.5), "loss": 0.5}
    (row,) = training.table(part).rows
    assert row[:3] == ("allreduce", "96.00 (91.20 .. 96.80)", "+0.00")
    assert row[-2:] == ("4.1 (4.1 .. 4.1)", "20.5 (20.5 .. 20.5)")
