"""``benchmarks/sketch.py``: which rows it trains, what it counts, and how it judges."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from helpers.scripts import benchmark
from wingbeat import strategies
from wingbeat.compression import LowRank, Sketch, for_parameter
from wingbeat_lab import paced
from wingbeat_lab.bench import contenders


@pytest.fixture(scope="module")
def sketch() -> Iterator[ModuleType]:
    with benchmark("sketch") as module:
        yield module


def run(share: float, seed: int, final: float, seconds: float, same: bool = True) -> dict[str, Any]:
    """A training that is half way up at its first mark, and at its end at its second."""
    curve = [
        {"iteration": 10, "s": 0.5 * seconds, "accuracy": 0.5 * final},
        {"iteration": 20, "s": seconds, "accuracy": final},
    ]
    return {"share": share, "seed": seed, "same_weights": same, "curve": curve}


DENSE = [run(0.0, 0, 80.0, 10.0), run(0.0, 1, 81.0, 12.0)]


def test_a_row_sketches_the_first_share_of_its_iterations(sketch: ModuleType) -> None:
    assert sketch.row_of(0.0, 40, "sketch") == "allreduce"
    wire = strategies.parse(sketch.row_of(0.25, 40, "sketch@4")).wire
    assert wire == Sketch(bits=4, share=0.25, total=40, auto_disable=False)
    assert wire.ends_after == 10
    paper = strategies.parse(sketch.row_of(1.0, 40, sketch.PAPER_WIRE)).wire
    assert paper == LowRank(bits=8, split="count", level="ends", total=40, auto_disable=False)
    grouped = contenders.parse(sketch.row_of(0.5, 40, "sketch:groups=0.*@fp32+6.*@4"))
    assert for_parameter(grouped.wire, "0.weight") == ""


def test_what_ends_well_and_sooner_keeps_the_rule(sketch: ModuleType) -> None:
    runs = [*DENSE, run(0.5, 0, 80.1, 8.0), run(1.0, 0, 80.0, 9.0), run(1.0, 1, 80.0, 9.0)]
    rows = sketch.by_share(runs)
    assert [row["share"] for row in rows] == [0.0, 0.5, 1.0]
    assert [row["accuracy"] for row in rows] == [80.5, 80.1, 80.0]
    assert [row["training_s"] for row in rows] == [11.0, 8.0, 9.0]
    # The dense one's first mark is 40.25%: one seed of it is below, and gets there at its end.
    assert [row["early_s"] for row in rows] == [(10.0 + 6.0) / 2, 8.0, 9.0]
    assert sketch.missed_22a(rows) == []


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (run(0.5, 0, 79.9, 8.0), "share 0.5 ends 0.60 points lower"),
        (run(0.5, 0, 80.5, 8.0, same=False), "share 0.5 leaves different weights"),
        (run(1.0, 0, 80.5, 10.0), "takes 0.91 of a dense one; limit 0.9"),
    ],
)
def test_what_misses_the_rule_is_said(sketch: ModuleType, other: Any, why: str) -> None:
    [line] = sketch.missed_22a(sketch.by_share([*DENSE, other]))
    assert why in line
    assert sketch.missed_22a(sketch.by_share([run(1.0, 0, 10.0, 99.0)])) == []


def test_a_training_that_never_gets_there_has_no_time(sketch: ModuleType) -> None:
    rows = sketch.by_share([*DENSE, run(1.0, 0, 30.0, 1.0)])
    assert rows[-1]["early_s"] is None


def test_the_layers_have_the_names_and_shapes_of_the_paced_model(sketch: ModuleType) -> None:
    profile = paced.load_profile("resnet50").scaled(0.01)
    named = {name: tuple(p.shape) for name, p in paced.PacedModel(profile).named_parameters()}
    assert dict(sketch.sketch_stack.layered(profile)) == named


def test_sketching_is_a_share_of_a_stack_of_times(sketch: ModuleType, monkeypatch: Any) -> None:
    options = argparse.Namespace(
        scale=0.01, workers=4, gbit=1.0, device="cpu", rounds=1, wire="sketch", profiles=["alexnet"]
    )
    monkeypatch.setattr(sketch.sketch_stack, "timed", lambda _action, _device: 0.002)
    row = sketch.sketch_stack.overhead("alexnet", Sketch(), options)
    numel = row["parameters"]
    whole = paced.load_profile("alexnet")
    assert row["compute_s"] == pytest.approx(1e-5 * (whole.forward_ms + whole.backward_ms))
    # Each worker sends 3 of 4 blocks twice, a byte for each element.
    assert row["links_s"] == pytest.approx(8 * 1.5 * numel / 1e9, rel=0.05)
    total = row["compute_s"] + row["links_s"] + 0.002
    assert row["share"] == pytest.approx(0.002 / total)
    options.threads = torch.get_num_threads()
    [line] = sketch.figure_22b(options)["missed"]
    assert "of an iteration of alexnet; limit 10%" in line


def test_the_largest_share_of_sketching_stands_first(sketch: ModuleType) -> None:
    usual = {"compute_s": 0.1, "links_s": 0.01, "sketch_s": 0.02, "samples_s": [0.01, 0.02, 0.04]}
    rows = [usual | {"model": "a", "share": 0.1}, usual | {"model": "b", "share": 0.4}]
    options = argparse.Namespace(
        wire="sketch", device="cpu", threads=1, workers=16, gbit=10.0, scale=1.0, rounds=3
    )
    made = sketch.table_22b(rows, options)
    assert made.rows[0] == ("b", "100.0", "20.0", "10.0 .. 40.0", "10.0", "40.0")


def test_a_model_that_the_sketch_slows_down_is_said_first(sketch: ModuleType) -> None:
    usual = {"lab": "star:4@10gbit", "row": "sketch", "bytes_ratio": 0.25, "samples": 100.0}
    usual |= {"samples_per_s": 50.0, "samples_s": [2.0, 2.5]}
    rows = [
        usual | {"model": "a", "time_ratio": 1.12},
        usual | {"model": "b", "time_ratio": 1.45},
        usual | {"model": "c", "time_ratio": 0.9},
    ]
    options = argparse.Namespace(scale=0.05, stretch=2.0, rounds=2, ddp_iterations=3)
    made = sketch.table_ddp(rows, options)
    assert made.title.endswith("models at 0.05 of their size, slow motion of 2")
    assert made.rows[0][:3] == ("star:4@10gbit, a, sketch", "50", "40 .. 50")
    assert [line.split()[3] for line in made.notes[:2]] == ["b", "a"]
    assert made.notes[2] == (
        "sketches: what grows with the model takes 40 times as long as measured here, "
        "as on the whole model"
    )


@pytest.mark.parametrize(
    "words",
    [
        "--wire topk",
        "--wire sketch:share=0.5:total=9:auto_disable=false",
        "--shares 1.5",
        "--rounds 0",
        "--workers 1",
        "--iterations 9",
        "--lab star:4@fast",
        "--labs star:4@1gbit star:4@fast",
        "--json /proc/none/x.json",
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_measured(
    sketch: ModuleType, words: str, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr(sketch, "MEASURE", {})
    monkeypatch.setattr("sys.argv", ["sketch.py", *words.split()])
    with pytest.raises(SystemExit) as ended:
        sys.exit(sketch.main())
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert words.split()[-1].lstrip("-") in said or "workers" in said
    assert len(said.strip().splitlines()) == 1


def test_the_table_has_the_range_over_seeds(sketch: ModuleType) -> None:
    options = argparse.Namespace(task="digits", lab="star:4", wire="sketch", seeds=[0, 1])
    rows = sketch.by_share([*DENSE, run(1.0, 0, 30.0, 1.0)])
    made = sketch.table_22a(rows, options)
    assert made.rows == (
        ("0%", "80.50", "80.00 .. 81.00", "11.0", "8.0"),
        ("100%", "30.00", "30.00 .. 30.00", "1.0", ""),
    )
