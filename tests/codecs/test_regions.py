"""Which gradients travel together, and by which codec."""

from __future__ import annotations

from wingbeat.codecs.codec import Dense, HalfCodec, SketchCodec
from wingbeat.codecs.coding import LARGE, Region, regions
from wingbeat.codecs.lowrank import LowRankCodec
from wingbeat.codecs.topk import TopKCodec
from wingbeat.compression import LowRank, Sketch, TopK
from wingbeat.types import Span

SIDE = 256
assert SIDE * SIDE == LARGE

PARAMETERS = [
    ("a.weight", (3, 2)),
    ("a.bias", ()),
    ("b.weight", (SIDE, SIDE)),
    ("c.weight", (5, SIDE, SIDE)),
    ("c.bias", (4,)),
    ("d.bias", (2,)),
]
ENDS = (0, 6, 7, 7 + LARGE, 7 + 6 * LARGE, 11 + 6 * LARGE, 13 + 6 * LARGE)


def span(first: int, last: int) -> Span:
    return Span(ENDS[first], ENDS[last])


def test_large_gradients_have_tables_of_their_own_and_the_rest_travels_in_runs() -> None:
    codec = SketchCodec(bits=8)
    assert list(regions(Sketch(), PARAMETERS)) == [
        Region(span(0, 2), codec),
        Region(span(2, 3), codec),
        Region(span(3, 4), codec),
        Region(span(4, 6), codec),
    ]


def test_only_large_matrices_have_columns() -> None:
    codec = LowRankCodec(4, SketchCodec(bits=8))
    assert [(each.span, each.cols) for each in regions(LowRank(bits=8), PARAMETERS)] == [
        (span(0, 2), 0),
        (span(2, 3), SIDE),
        (span(3, 4), 0),
        (span(4, 6), 0),
    ]
    assert all(each.codec == codec for each in regions(LowRank(bits=8), PARAMETERS))


def test_without_bits_convolutions_are_matrices_too_and_the_rest_is_dense() -> None:
    codec = LowRankCodec(4)
    assert list(regions(LowRank(), PARAMETERS)) == [
        Region(span(0, 2), Dense()),
        Region(span(2, 3), codec, SIDE),
        Region(span(3, 6), Dense()),  # the convolution has 5 rows
    ]
    assert [each.cols for each in regions(LowRank(), [("conv", (64, 128, 3, 3))])] == [1152]


def test_top_k_chooses_from_a_whole_run() -> None:
    assert list(regions(TopK(density=0.1, warmup=0), PARAMETERS)) == [
        Region(span(0, 6), TopKCodec(0.1))
    ]


def test_each_group_has_its_codec_and_dense_ones_travel_together() -> None:
    wire = Sketch(
        bits=3,
        split="count",
        groups={
            "*.bias": "fp32",
            "c.*": "fp32",
            "b.*": LowRank(rank=2, bits=8, level="ends"),
            "d*": 5,
        },
    )
    assert list(regions(wire, PARAMETERS)) == [
        Region(span(0, 1), SketchCodec(3, "count")),
        Region(span(1, 2), Dense()),
        Region(span(2, 3), LowRankCodec(2, SketchCodec(8, "error", "ends")), SIDE),
        Region(span(3, 6), Dense()),
    ]
    half = Sketch(groups={"c.*": "fp16", "a.*": 2})
    assert [each.codec for each in regions(half, PARAMETERS)] == [
        SketchCodec(2),
        SketchCodec(8),
        HalfCodec(),
        SketchCodec(8),
    ]


def test_a_group_of_bits_in_low_rank_keeps_the_rank_and_all_else() -> None:
    wire = LowRank(rank=3, split="count", feedback=False, groups={"b.*": 2})
    found = [each for each in regions(wire, PARAMETERS) if each.span == span(2, 3)]
    assert found == [
        Region(span(2, 3), LowRankCodec(3, SketchCodec(2, "count", feedback=False)), SIDE)
    ]


def test_parameters_named_dense_are_encoded_by_no_codec() -> None:
    for wire in (Sketch(bits=2), LowRank(rank=2, bits=4), TopK(warmup=0), Sketch(groups={"b*": 4})):
        found = list(regions(wire, PARAMETERS, dense={"a.bias", "b.weight"}))
        dense = [each for each in found if each.codec == Dense()]
        assert dense[0] == Region(span(1, 3), Dense())
        assert found[0].span == span(0, 1)
        assert [each for each in found if each.codec == Dense()] == dense[:1]


def test_all_elements_are_in_one_region_whatever_the_groups() -> None:
    for wire in (Sketch(), LowRank(groups={"c*": "fp16"}), Sketch(groups={"*": "fp32"}), TopK()):
        found = list(regions(wire, PARAMETERS))
        assert [each.span.start for each in found] == [0, *[each.span.stop for each in found[:-1]]]
        assert found[-1].span.stop == ENDS[-1]
    assert not list(regions(Sketch(), []))
