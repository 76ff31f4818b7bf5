"""Which parts of flat gradients travel by which codec."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from wingbeat import wires
from wingbeat.codecs.codec import Codec
from wingbeat.codecs.coding import Region
from wingbeat.codecs.dense import Dense
from wingbeat.codecs.lowrank import LowRankCodec
from wingbeat.codecs.make import make
from wingbeat.codecs.sketch import SketchCodec
from wingbeat.types import Span
from wingbeat.wires import Coded, matrix_of

LARGE = 1 << 16
"""Elements from which a gradient travels by itself: worth a table of its own levels, or factors if
it is a matrix (Canary, section 4.3.1, case 1)."""


def regions(
    wire: Coded, parameters: Sequence[tuple[str, Sequence[int]]], step: int = 0
) -> Iterator[Region]:
    """Yield large gradients by themselves if their codec gains by that, and the rest in runs.

    A run has one codec: that of its parameters' group.

    Args:
        wire: the codec's settings.
        parameters: name and shape of each, in the order in which their gradients lie.
        step: counted from 0.
    """
    start = end = 0
    codec: Codec | None = None
    for name, shape in parameters:
        stop = end + math.prod(shape)
        own = make(wire, step, name)
        large = stop - end >= LARGE
        cols = matrix_of(wires.own(wire, name), shape)[1] if large else 0
        if isinstance(own, LowRankCodec) and isinstance(own.inner, Dense) and not cols:
            own = own.inner
        alone = isinstance(own, LowRankCodec | SketchCodec) and large
        if codec is not None and end > start and (alone or own != codec):
            yield Region(Span(start, end), codec)
            start = end
        if alone:
            yield Region(Span(end, stop), own, cols)
            start = stop
        codec, end = own, stop
    if codec is not None and end > start:
        yield Region(Span(start, end), codec)
