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
    found = {name: part["all_reduce_s"] for name, part in ripples.placement(args)}
    assert found == {"1x2": 2.0, "2x1": 0.2, "4x1": 0.2, "4x2": 0.2}
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
