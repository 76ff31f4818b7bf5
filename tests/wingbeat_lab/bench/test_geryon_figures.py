"""``benchmarks/geryon.py``: what it asks the bench for, and how it judges."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from helpers.scripts import benchmark
from wingbeat.errors import UsageError

GERYON, SLICED = "geryon", "partitionedps:pull=start,order=random"
OF_PAPER = "geryon:pull=start"


@pytest.fixture(scope="module")
def geryon() -> Iterator[ModuleType]:
    with benchmark("geryon") as module:
        yield module


def args(geryon: ModuleType, **values: Any) -> argparse.Namespace:
    usual = {
        "rows": None,
        "compare": "systems",
        "iterations": 6,
        "rounds": 2,
        "warmup": 2,
        "workers": None,
        "scale": 0.05,
        "stretch": 4.0,
        "cross_traffic": "0.8",
        "cross_flows": 4,
    }
    return argparse.Namespace(**{**usual, **values})


def test_every_model_has_a_profile_and_rows_that_can_run(geryon: ModuleType) -> None:
    for rate in geryon.PAPER:
        for model in geryon.MODELS:
            checked = geryon.config(rate, 8, model, args(geryon)).check()
            assert [row.traits.exact for row in checked.rows] == [True] * len(geryon.ROWS)


def test_rows_with_servers_are_in_the_clear_and_others_as_they_are(geryon: ModuleType) -> None:
    rows = geryon.config(10.0, 8, "vgg19", args(geryon)).strategies
    assert [("encrypted=False" in row) for row in rows] == [True] * 6 + [False] * 2


def test_senders_are_compared_with_the_papers_slices(geryon: ModuleType) -> None:
    made = geryon.config(10.0, 8, "vgg19", args(geryon, compare="senders"))
    assert made.strategies[:4] == (
        "geryon:pull=start,slice=1048576,encrypted=False",
        "tictac:slice=1048576,encrypted=False",
        "geryon:slice=1048576,encrypted=False",
        "p3:slice=1048576,encrypted=False",
    )
    assert len(made.strategies) == 12
    slices = {row.strategy.exchange.slice for row in made.check().rows}
    assert slices == {52_429, 26_214, 13_107}  # as many as in the whole model


def test_slicing_is_compared_on_two_workers(geryon: ModuleType) -> None:
    made = geryon.config(10.0, 2, "vgg19", args(geryon, compare="slicing"))
    assert made.lab == "star:2@10gbit,prio=2"
    assert made.strategies[:3] == (
        "vanillaps:encrypted=False",
        "partitionedps:pull=start,order=random,slice=0,encrypted=False",
        "partitionedps:slice=0,encrypted=False",
    )
    assert made.check().rows[1].strategy.exchange.slice == 0


def test_others_use_the_trunks_of_an_oversubscribed_tree(geryon: ModuleType) -> None:
    made = geryon.config(10.0, 4, "vgg19", args(geryon, compare="cross", cross_traffic="0.5"))
    assert made.lab == "fat-tree:4/2@10gbit+10gbit,prio=2,cross=5gbitx4"
    checked = made.check()
    assert str(checked.lab) == "fat-tree:4/2@125mbit+125mbit,prio=2,cross=62500kbitx4"
    classes = {row.text: row.strategy.exchange.classes for row in checked.rows[2:]}
    assert classes[f"{OF_PAPER},classes=1,encrypted=False"] == 1
    assert classes[f"{OF_PAPER},encrypted=False"] == 2
    assert set(geryon.simulations(made)) == {None}  # virtual time knows no trunks


def test_cross_traffic_without_a_shared_link_is_refused(geryon: ModuleType) -> None:
    with pytest.raises(UsageError, match="a fat-tree lab of 1 leaf switch"):
        geryon.config(10.0, 1, "vgg19", args(geryon, compare="cross"))


def test_all_models_are_in_the_same_slow_motion(geryon: ModuleType) -> None:
    made = [
        geryon.config(rate, workers, model, args(geryon, stretch=geryon.arguments([]).stretch))
        for rate in geryon.PAPER
        for workers in (2, 8)
        for model in geryon.MODELS
    ]
    assert {config.stretch for config in made} == {geryon.STRETCH}


def test_geryon_figures_with_two_iterations_are_refused(geryon: ModuleType) -> None:
    with pytest.raises(UsageError, match="--iterations 2: allowed are 3 or more"):
        geryon.fill(args(geryon, iterations=2), {})


def row(
    efficiency: float, of_bound: float | None = None, images: float = 1.0, off: float = -0.012
) -> dict[str, Any]:
    return {
        "efficiency": efficiency,
        "iteration_s": {"median": 1.0, "p10": 0.9, "p90": 1.25},
        "images_per_s": images,
        "of_bound": of_bound,
        "share_by_class": {"ef": 0.25, "be": 0.75},
        "limited_by_cores": False,
        "simulated_off": off,
    }


def found(
    geryons: float, sliced: float, of_bound: float = 1.0, off: float = -0.012
) -> dict[str, Any]:
    return {"rows": {GERYON: row(geryons, of_bound, off=off), SLICED: row(sliced)}}


@pytest.mark.parametrize(
    ("model", "figures", "words"),
    [
        ("vgg19", found(0.95, 0.8), []),
        ("vgg19", found(0.94, 0.8), ["the paper's is 0.946"]),
        ("vgg19", found(0.95, 0.8, of_bound=0.94), ["0.940 of the bound"]),
        ("vgg19", found(0.95, 0.96), ["of partition and slicing; limit 1.0"]),
        ("resnet50", found(0.97, 0.925), ["1.049 of partition and slicing; limit 1.05"]),
        ("resnet50", found(0.97, 0.92), []),
        ("vgg19", found(0.95, 0.8, off=-0.11), ["virtual time is -11.0% off"]),
        (
            "vgg19",
            {"rows": found(0.95, 0.9)["rows"] | {OF_PAPER: row(0.85)}},
            [f"{OF_PAPER}: efficiency 0.850; the paper's is 0.946", f"{OF_PAPER}: 0.944 of part"],
        ),
    ],
)
def test_geryon_report_names_what_is_missed(
    geryon: ModuleType, model: str, figures: dict[str, Any], words: list[str]
) -> None:
    missed = geryon.judged("here", model, 10.0, figures, geryon.paper(10.0, 8, model))
    assert len(missed) == len(words)
    assert all(word in line for word, line in zip(words, missed, strict=True))


def test_the_papers_own_lead_is_smaller_on_the_faster_network(geryon: ModuleType) -> None:
    papers = geryon.paper(40.0, 8, "resnet50")
    assert geryon.judged("here", "resnet50", 40.0, found(0.97, 0.96), papers) == []
    [line] = geryon.judged("here", "resnet50", 40.0, found(0.97, 0.98), papers)
    assert "limit 1.0" in line


@pytest.mark.parametrize(
    ("leads", "fine"), [((1.0, 1.1, 1.2), True), ((0.9, 1.1, 1.2), False), ((1.2, 1.1, 1.3), False)]
)
def test_the_lead_over_other_senders_is_to_grow(
    geryon: ModuleType, leads: tuple[float, ...], fine: bool
) -> None:
    rows = {}
    for ours, other in geryon.SENDERS:
        for n, lead in zip(geryon.SLICES, leads, strict=True):
            rows[geryon.sliced(ours, n)] = row(0.9, images=10 * lead)
            rows[geryon.sliced(other, n)] = row(0.9, images=10)
    missed = geryon.judged_senders("here", {"rows": rows})
    assert len(missed) == (0 if fine else 2)


def test_a_tuned_threshold_is_compared_with_others_on_four_workers(geryon: ModuleType) -> None:
    made = geryon.config(10.0, 4, "yolo", args(geryon, compare="thresholds"))
    assert geryon.WORKERS["thresholds"] == [4]
    assert made.strategies[:2] == (
        "geryon:pull=start,threshold=tuned,encrypted=False",
        "geryon:pull=start,threshold=0.97,encrypted=False",
    )
    assert len(made.check().rows) == 12
    assert "geryon:threshold=tuned,encrypted=False" in made.strategies  # pulled at once, beside


@pytest.mark.parametrize(("tuned", "fine"), [(0.9, True), (1.02, True), (1.021, False)])
def test_a_tuned_threshold_is_nearly_the_best(geryon: ModuleType, tuned: float, fine: bool) -> None:
    times = {geryon.TUNED: tuned, "geryon:pull=start,threshold=0.5": 1.0, "other": 1.1}
    rows = {name: {"iteration_s": {"median": time}} for name, time in times.items()}
    missed = geryon.judged_thresholds("here", {"rows": rows})
    assert len(missed) == (0 if fine else 1)


def test_rows_are_shown_beside_the_papers(geryon: ModuleType) -> None:
    config = {"model": "paced:vgg19_k40@0.05", "iterations": 6, "rounds": 2, "stretch": 4.0}
    part = found(0.951, 0.8) | {"config": config, "lab": "star:8@1gbit,prio=2"}
    geryons, sliced = geryon.table("here", part, geryon.paper(10.0, 8, "vgg19")).rows
    # 0.951 / 1.25 and 0.951 / 0.9.
    assert geryons[1:] == (
        *("0.951", "0.761 .. 1.057", "0.946", "1.000", "-1.2", "1.0", "25", "75"),
    )
    assert sliced[1:4] == ("0.800", "0.640 .. 0.889", "0.793")


def test_geryon_paper_figures_are_of_eight_workers_only(geryon: ModuleType) -> None:
    assert geryon.paper(10.0, 4, "vgg19") == {}
    assert geryon.paper(25.0, 8, "vgg19") == {}


def test_a_table_has_the_spread_the_paper_and_what_classes_are_worth(geryon: ModuleType) -> None:
    met = {"bytes": 1e9, "bit_per_s": [4e8, 4e8], "cores": 0.1}
    rows = {f"{OF_PAPER},classes=1": row(0.4), OF_PAPER: row(0.5) | {"limited_by_cores": True}}
    rows[OF_PAPER]["cross_traffic"] = met
    lab = "fat-tree:4/2@1gbit+500mbit,prio=2,cross=400mbitx4"
    config = {"model": "paced:vgg19_k40@0.05", "iterations": 6, "rounds": 2, "stretch": 4.0}
    made = geryon.table("here", {"rows": rows, "config": config, "lab": lab}, {OF_PAPER: 0.946})
    assert made.title == "here, stretch 4"
    # Iterations take 0.9 to 1.25 of the median.
    assert made.rows[1][:4] == (OF_PAPER, "0.500", "0.400 .. 0.556", "0.946")
    assert made.rows[0][3] == ""
    assert f"limited by this machine's cores: {OF_PAPER}" in made.notes
    assert f"{OF_PAPER}: 1.250 times as fast as without classes" in made.notes
    assert made.notes[-1].startswith(f"{OF_PAPER}: 1000 MB; each way 400 Mbit/s")
