"""How a buffer's regions are put into one payload."""

from __future__ import annotations

from wingbeat import wires
from wingbeat.codecs import Coding
from wingbeat.codecs.coding import Region
from wingbeat.codecs.dense import Dense
from wingbeat.codecs.make import make
from wingbeat.types import Span


def test_the_largest_region_says_what_an_element_takes() -> None:
    sketch = make(wires.of("sketch"))
    small, large = Region(Span(0, 10), Dense()), Region(Span(10, 1000), sketch)
    assert sketch.bytes_per_element != Dense().bytes_per_element
    assert Coding([small, large]).bytes_per_element == sketch.bytes_per_element
    assert Coding(
        [Region(Span(0, 10), sketch), Region(Span(10, 99), Dense())]
    ).bytes_per_element == (Dense().bytes_per_element)


def test_one_matrix_among_the_regions_keeps_chunks_as_large_as_they_can_be() -> None:
    """Elements that take nothing on the wire: the engine cuts by bytes, and so not at all."""
    matrix = Region(Span(0, 640), make(wires.of("lowrank@2")), cols=64)
    flags = Region(Span(640, 5000), Dense())
    assert Coding([matrix, flags]).bytes_per_element == 0.0
    assert Coding([flags]).bytes_per_element > 0.0
