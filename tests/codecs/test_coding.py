"""How a buffer's regions are put into one payload."""

from __future__ import annotations

import torch

from wingbeat import compression
from wingbeat.codecs import Coding
from wingbeat.codecs.codec import Dense, SketchCodec
from wingbeat.codecs.coding import Region, make
from wingbeat.types import Span


def test_the_largest_region_says_what_an_element_takes() -> None:
    sketch = make(compression.parse("sketch"))
    small, large = Region(Span(0, 10), Dense()), Region(Span(10, 1000), sketch)
    assert sketch.bytes_per_element != Dense().bytes_per_element
    assert Coding([small, large]).bytes_per_element == sketch.bytes_per_element
    assert Coding(
        [Region(Span(0, 10), sketch), Region(Span(10, 99), Dense())]
    ).bytes_per_element == (Dense().bytes_per_element)


def test_one_matrix_among_the_regions_keeps_chunks_as_large_as_they_can_be() -> None:
    """Elements that take nothing on the wire: the engine cuts by bytes, and so not at all."""
    matrix = Region(Span(0, 640), make(compression.parse("lowrank@2")), cols=64)
    flags = Region(Span(640, 5000), Dense())
    assert Coding([matrix, flags]).bytes_per_element == 0.0
    assert Coding([flags]).bytes_per_element > 0.0


def test_a_span_is_cut_where_whole_rows_begin_and_end() -> None:
    """Each piece has a table of its own, so there are no more than it takes."""
    codec, row = make(compression.parse("lowrank@2:bits=8")), 4096
    coding = Coding([Region(Span(row, 65 * row), codec, cols=row)])
    assert codec.nbytes(row) < 2 * codec.nbytes(row // 2)

    def room(start: float, stop: float) -> int:
        return coding.room(Span(int((1 + start) * row), int((1 + stop) * row)))

    half = codec.nbytes(row // 2)
    assert room(0, 64) == codec.nbytes(64 * row, row)
    assert room(0.5, 64) == half + codec.nbytes(63 * row, row)
    assert room(0, 63.5) == codec.nbytes(63 * row, row) + half
    assert room(0.5, 63.5) == 2 * half + codec.nbytes(62 * row, row)
    # No whole row: one piece, whether the end of a row lies in it or not.
    assert room(0.25, 0.75) == half
    assert room(0.5, 1.5) == codec.nbytes(row)
    assert room(0.25, 1.75) == codec.nbytes(row + row // 2)


def test_a_part_that_is_cut_out_makes_the_same_payload() -> None:
    codec = make(compression.parse("lowrank@2"))
    coding = Coding([Region(Span(3, 643), codec, cols=64), Region(Span(643, 700), Dense())])
    x = torch.randn(700, generator=torch.Generator().manual_seed(0))
    for span in (Span(3, 700), Span(0, 643), Span(70, 650), Span(100, 110), Span(650, 660)):
        alone = coding.cut(span)
        whole = torch.zeros(coding.room(span), dtype=torch.uint8)
        part = torch.zeros(alone.room(Span(0, len(span))), dtype=torch.uint8)
        coding.encode(x, span, whole)
        alone.encode(x[span.start : span.stop], Span(0, len(span)), part)
        assert torch.equal(whole, part)
        again = alone.cut(Span(0, len(span)))
        assert [r.cols for r in again.regions] == [r.cols for r in alone.regions]
    assert [r.cols for r in coding.cut(Span(70, 650)).regions] == [0, 64, 0]


def test_what_another_codec_has_left_goes_along_once_where_none_is_kept() -> None:
    """In groups that are dense, or keep nothing: after a switch, or other settings than before."""
    keeps, drops = SketchCodec(bits=4), SketchCodec(bits=4, feedback=False)
    regions = [Region(Span(i, i + 100), c) for i, c in ((0, keeps), (100, Dense()), (200, drops))]
    coding, whole = Coding(regions), Span(0, 300)
    x = torch.linspace(1.0, 2.0, 300)
    residual = torch.full((300,), 0.5)
    payload = torch.empty(coding.room(whole), dtype=torch.uint8)
    arrived = []
    for _ in range(2):
        out = torch.empty(300)
        coding.encode(x, whole, payload, residual)
        coding.decode(payload, out, whole)
        arrived.append(out)
    assert not residual[100:].any()
    assert torch.equal(arrived[0][100:200], x[100:200] + 0.5)
    assert torch.equal(arrived[1][100:200], x[100:200])
    torch.testing.assert_close(arrived[0][200:], x[200:] + 0.5, rtol=0.05, atol=0.05)
    torch.testing.assert_close(arrived[1][200:], x[200:], rtol=0.05, atol=0.05)
    total = arrived[0] + arrived[1] + residual
    torch.testing.assert_close(total[:100], 2 * x[:100] + 0.5)
    assert torch.equal(x, torch.linspace(1.0, 2.0, 300))
