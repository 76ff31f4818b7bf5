"""``benchmarks/geryon.py``: what it asks the bench for, and how it judges."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from helpers.scripts import benchmark

GERYON, SLICED = "geryon:pull=start", "partitionedps:pull=start"


@pytest.fixture(scope="module")
def geryon() -> Iterator[ModuleType]:
    with benchmark("geryon") as module:
        yield module


def args(geryon: ModuleType, **values: Any) -> argparse.Namespace:
    usual = {
        "rows": list(geryon.ROWS),
        "slices": None,
        "iterations": 6,
        "rounds": 2,
        "warmup": 2,
        "workers": 8,
        "scale": 0.05,
        "stretch": None,
    }
    return argparse.Namespace(**{**usual, **values})


def test_every_model_has_a_profile_and_rows_that_can_run(geryon: ModuleType) -> None:
    for rate in geryon.PAPER:
        for model in geryon.MODELS:
            checked = geryon.config(rate, model, args(geryon)).check()
            assert [row.traits.exact for row in checked.rows] == [True] * len(geryon.ROWS)


def test_rows_with_servers_are_in_the_clear_and_others_as_they_are(geryon: ModuleType) -> None:
    rows = geryon.config(10.0, "vgg19", args(geryon)).strategies
    assert [("encrypted=False" in row) for row in rows] == [True, True, True, True, False, False]


def test_slices_shrink_with_the_model(geryon: ModuleType) -> None:
    rows = geryon.config(10.0, "vgg19", args(geryon, slices=[1 << 20])).strategies
    assert rows == (
        "geryon:pull=start,slice=52429,encrypted=False",
        "tictac:pull=start,slice=52429,encrypted=False",
        "p3:mb=1,slice=52429,encrypted=False",
    )


def found(geryons: float, sliced: float, of_bound: float = 1.0) -> dict[str, Any]:
    rows = {
        GERYON: {"efficiency": geryons, "of_bound": of_bound},
        SLICED: {"efficiency": sliced, "of_bound": None},
    }
    return {"rows": rows}


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        (found(0.95, 0.8), []),
        (found(0.94, 0.8), ["the paper's is 0.946"]),
        (found(0.95, 0.8, of_bound=0.94), ["0.940 of the bound"]),
        (found(0.95, 0.96), ["slower than partition"]),
    ],
)
def test_what_is_missed_is_said(
    geryon: ModuleType, figures: dict[str, Any], words: list[str]
) -> None:
    missed = geryon.judged(10.0, "vgg19", figures)
    assert len(missed) == len(words)
    assert all(word in line for word, line in zip(words, missed, strict=True))


def test_rows_are_shown_beside_the_papers(
    geryon: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    geryon.show(10.0, "vgg19", found(0.951, 0.8))
    shown = capsys.readouterr().out
    assert "0.951  0.946     1.000" in shown
    assert "0.800  0.793" in shown
