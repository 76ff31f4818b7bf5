"""From settings to codecs, and what a bucket's regions make of them."""

from __future__ import annotations

import itertools

import pytest

from wingbeat.codecs import Coding, make
from wingbeat.codecs.codec import Dense, SketchCodec
from wingbeat.codecs.coding import TRIED, Region, all_of
from wingbeat.codecs.lowrank import LowRankCodec
from wingbeat.codecs.topk import warmed_up
from wingbeat.compression import Half, LowRank, Sketch, TopK
from wingbeat.planning.trials import (
    COMPRESSION_BLOCKS,
    COMPRESSION_FIRST_WARMUP,
    COMPRESSION_ITERATIONS,
    COMPRESSION_WARMUP,
)
from wingbeat.types import Span


@pytest.mark.parametrize("wire", [Sketch(bits=5), TopK(), LowRank(), Half()], ids=repr)
def test_equal_settings_give_equal_codecs(wire) -> None:
    assert make(wire, 3) == make(type(wire)(**vars(wire)), 7)


def test_only_a_warm_up_changes_the_codec() -> None:
    wire = TopK(density=0.001, warmup=4, auto_disable=False)
    densities = [make(wire, step).bytes_per_element / 6 for step in range(6)]
    assert densities[0] == pytest.approx(0.25)
    assert densities == sorted(densities, reverse=True)
    assert densities[4:] == [pytest.approx(0.001)] * 2
    ratios = [b / a for a, b in itertools.pairwise(densities[:5])]
    assert ratios == [pytest.approx(ratios[0])] * 4


def test_a_trial_is_of_what_will_travel_and_the_warm_up_begins_after_it() -> None:
    tried, used = TopK(density=0.01, warmup=400), TopK(density=0.01, warmup=400, auto_disable=False)
    sent = [make(tried, step).bytes_per_element / 6 for step in range(401)]
    assert sent[:TRIED] == [0.01] * TRIED
    assert sent[TRIED:] == [make(used, s).bytes_per_element / 6 for s in range(TRIED, 401)]
    assert sent[TRIED] == max(sent) > 0.15
    # No trial is longer, whatever it measures; and a short warm-up is not all trial.
    block = COMPRESSION_ITERATIONS + COMPRESSION_WARMUP + 1
    assert COMPRESSION_FIRST_WARMUP + COMPRESSION_BLOCKS * block <= TRIED
    short = [make(TopK(density=0.01, warmup=20), step).bytes_per_element for step in range(21)]
    assert short[9] == short[20] == pytest.approx(0.06)
    assert short[10] > 2 * short[9]


@pytest.mark.parametrize(("density", "warmup"), [(0.5, 10), (0.25, 10), (0.001, 0)])
def test_no_warm_up_from_above_a_quarter(density, warmup) -> None:
    assert warmed_up(density, warmup, 0) == density


@pytest.mark.parametrize("wire", [Sketch(), TopK(density=0.1), LowRank(), Half()], ids=repr)
@pytest.mark.parametrize("cols", [0, 50])
def test_bytes_per_element_is_about_what_a_payload_takes(wire, cols) -> None:
    codec = make(wire)
    numel = 1_000_000
    if cols and isinstance(wire, LowRank):
        assert codec.nbytes(numel, cols) < codec.nbytes(numel) / 2
    else:
        assert codec.nbytes(numel, cols) == pytest.approx(codec.bytes_per_element * numel, rel=0.01)


def test_a_payload_is_aligned_and_its_size_follows_from_the_span() -> None:
    sketch = make(Sketch(bits=3))
    coding = Coding([Region(Span(0, 1001), sketch), Region(Span(1001, 1004), Dense())])
    assert coding.room(Span(0, 1004)) % 4 == 0
    assert coding.room(Span(1001, 1004)) == 12
    assert coding.room(Span(1000, 1002)) == sketch.nbytes(1) + 4
    assert coding.room(Span(7, 7)) == 0


def test_factors_are_sketched_as_the_paper_does_it() -> None:
    wire = LowRank(rank=3, bits=7, split="count", level="ends", feedback=False)
    assert make(wire) == LowRankCodec(3, SketchCodec(7, "count", "ends", False))


def test_two_ends_of_a_wire_have_one_list_of_codecs() -> None:
    wire = Sketch(bits=3, groups={"a*": LowRank(rank=2, bits=8), "b*": "fp32", "c*": 3, "d*": 4})
    assert all_of(wire) == (
        Dense(),
        SketchCodec(3),
        LowRankCodec(2, SketchCodec()),
        SketchCodec(4),
    )
    for name in ("a", "b", "c", "d", "e"):
        assert make(wire, 0, name) in all_of(wire)
    assert all_of(Half())[1:] == (make(Half()),)
