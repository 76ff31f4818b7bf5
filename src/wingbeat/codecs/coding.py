"""The codec of each region of a flat buffer, and the payload of any span."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wingbeat import _native, compression
from wingbeat.codecs.codec import ALIGNMENT, Codec, Dense, HalfCodec, SketchCodec
from wingbeat.codecs.lowrank import LowRankCodec
from wingbeat.codecs.topk import TopKCodec, warmed_up
from wingbeat.compression import (
    Coded,
    Half,
    LowRank,
    Sketch,
    for_parameter,
    kinds,
    options_of,
)
from wingbeat.observe import meter
from wingbeat.types import Span

TRIED = 40
"""Maximum duration of a codec's trial at the start of training, in steps."""


def make(wire: Coded, step: int = 0, name: str = "") -> Codec:
    """Return the codec of ``wire`` for the parameter ``name`` in step ``step``, counted from 0.

    Equal options give equal codecs. A warm-up begins after the trial, which must measure the final
    density.
    """
    mine = for_parameter(wire, name)
    options = options_of(mine)
    density = options.fixed_density
    if density is None:
        return _constant(mine)
    if not options.auto_disable or step >= min(TRIED, options.warmup_steps // 2):
        density = warmed_up(density, options.warmup_steps, step)
    return _topk(density, options.momentum, options.bits)


def all_of(wire: Coded) -> tuple[Codec, ...]:
    """Return every codec that gradients may use, in the order of `wingbeat.compression.kinds`."""
    return tuple(map(_constant, kinds(wire)))


@functools.lru_cache(maxsize=64)
def _topk(density: float, momentum: float, bits: int) -> Codec:
    return TopKCodec(density, momentum, bits=bits)


@functools.cache
def _constant(wire: str | Coded) -> Codec:
    match wire:
        case "":
            return Dense()
        case Half():
            return HalfCodec()
        case Sketch():
            return SketchCodec(wire.bits, wire.split, wire.level, wire.feedback)
        case LowRank(bits=compression.WHOLE_BITS):
            return LowRankCodec(wire.rank)
        case LowRank():
            inner = SketchCodec(wire.bits, wire.split, wire.level, wire.feedback)
            return LowRankCodec(wire.rank, inner)
    raise AssertionError(f"{wire} is no codec")


@dataclass(frozen=True)
class Region:
    """Elements with one codec; with ``cols``, rows of a matrix with that number of columns."""

    span: Span
    codec: Codec
    cols: int = 0


@dataclass(frozen=True)
class _Part(Region):
    """A part of the intersection of a span and a region; with ``cols``, complete rows."""

    nbytes: int = 0


class Coding:
    """Encodes and decodes any span of a flat float buffer.

    The regions are equal on all workers, so the span determines the size and format of a payload.
    """

    def __init__(self, regions: Sequence[Region]) -> None:
        self.regions = tuple(regions)
        self._parts: dict[Span, tuple[_Part, ...]] = {}

    @property
    def bytes_per_element(self) -> float:
        """Approximate bytes per element of the largest region; 0 if blocks must not be divided."""
        if any(region.cols for region in self.regions):
            return 0.0  # factors of undivided matrices are the smallest
        return max(self.regions, key=lambda region: len(region.span)).codec.bytes_per_element

    @functools.cached_property
    def native(self) -> _native.Coding | None:
        """The coding in the extension; None if only Python can run one of its codecs."""
        made = _native.Coding()
        for region in self.regions:
            codec = region.codec.native
            if codec is None or region.cols:
                return None
            number, bits, by_error, ends, density = codec
            span, feedback = region.span, region.codec.feedback
            made.add(span.start, span.stop, number, feedback, bits, by_error, ends, density)
        return made

    def room(self, span: Span) -> int:
        """Return the exact size of the payload of ``span`` in bytes."""
        return sum(_aligned(part.nbytes) for part in self._parts_of(span))

    def cut(self, span: Span) -> Coding:
        """Return the coding of ``buffer[span]`` as a separate buffer, with the same payload."""
        return self.joined([span])

    def joined(self, spans: Sequence[Span]) -> Coding:
        """Return the coding of a buffer that has these spans of this one, one after the other."""
        found, end = [], 0
        for span in spans:
            shift = end - span.start
            end += len(span)
            for part in self._parts_of(span):
                place = Span(part.span.start + shift, part.span.stop + shift)
                found.append(Region(place, part.codec, part.cols))
        return Coding(found)

    def encode(
        self,
        buffer: Tensor,
        span: Span,
        payload: Tensor,
        residual: Tensor | None = None,
        velocity: Tensor | None = None,
    ) -> None:
        """Write ``buffer[span]`` into ``payload``.

        ``residual`` and ``velocity`` (for momentum correction) have the buffer's length. A codec
        without error feedback sends any residual of an earlier codec once.
        """
        begin = time.monotonic_ns()
        for part, into in self._payloads(span, payload):
            place = slice(part.span.start, part.span.stop)
            x = buffer[place].to(torch.float32)
            own = None if residual is None else residual[place]
            if own is not None and not part.codec.feedback:
                x = x + own
                own.zero_()
                own = None
            moving = None if velocity is None else velocity[place]
            part.codec.encode(x, into, residual=own, cols=part.cols, velocity=moving)
        meter.codec.add(time.monotonic_ns() - begin)

    def decode(self, payload: Tensor, buffer: Tensor, span: Span, *, add: bool = False) -> None:
        """Decode ``payload`` into ``buffer[span]``, or add it; raises `ValueError` if malformed."""
        begin = time.monotonic_ns()
        for part, encoded in self._payloads(span, payload):
            out = buffer[part.span.start : part.span.stop]
            if out.dtype is torch.float32:
                part.codec.decode(encoded, out, add=add, cols=part.cols)
                continue
            wide = out.float() if add else torch.empty_like(out, dtype=torch.float32)
            part.codec.decode(encoded, wide, add=add, cols=part.cols)
            out.copy_(wide)
        meter.codec.add(time.monotonic_ns() - begin)

    def _payloads(self, span: Span, payload: Tensor) -> Iterator[tuple[_Part, Tensor]]:
        start = 0
        for part in self._parts_of(span):
            yield part, payload[start : start + part.nbytes]
            start += _aligned(part.nbytes)

    def _parts_of(self, span: Span) -> tuple[_Part, ...]:
        known = self._parts.get(span)
        if known is None:
            common = [
                (region, Span(max(span.start, of.start), min(span.stop, of.stop)))
                for region, of in ((region, region.span) for region in self.regions)
            ]
            found = (part for region, each in common if each for part in _by_rows(region, each))
            known = self._parts[span] = tuple(found)
        return known


def _by_rows(region: Region, span: Span) -> Iterator[_Part]:
    """Yield up to three parts: the end of a row, complete rows, and the beginning of a row."""
    first, last = span.start, span.stop
    if region.cols:
        origin = region.span.start
        first = origin + -(-(span.start - origin) // region.cols) * region.cols
        last = origin + (span.stop - origin) // region.cols * region.cols
        if first >= last:
            first = last = span.stop
    for piece, cols in (
        (Span(span.start, first), 0),
        (Span(first, last), region.cols),
        (Span(last, span.stop), 0),
    ):
        if piece:
            yield _Part(piece, region.codec, cols, region.codec.nbytes(len(piece), cols))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


LARGE = 1 << 16
"""Minimum number of elements for which a gradient is a separate region, with its own table of
levels, or factors if it is a matrix (Canary, section 4.3.1, case 1).
"""


def regions(
    wire: Coded,
    parameters: Sequence[tuple[str, Sequence[int]]],
    step: int = 0,
    dense: Collection[str] = (),
) -> Iterator[Region]:
    """Yield large gradients as separate regions if their codec benefits, and others in runs.

    ``parameters`` has the name and shape of each, in the order of the gradients. Adjacent
    parameters with equal codecs form a run. ``step`` is counted from 0. Parameters named in
    ``dense`` are not encoded.
    """
    start = end = 0
    codec: Codec | None = None
    for name, shape in parameters:
        stop = end + math.prod(shape)
        own = Dense() if name in dense else make(wire, step, name)
        large = stop - end >= LARGE
        cols = options_of(for_parameter(wire, name)).matrix_of(shape)[1] if large else 0
        if name in dense:
            cols = 0
        if not cols:
            own = own.without_matrix()
        alone = own.separate and large
        if codec is not None and end > start and (alone or own != codec):
            yield Region(Span(start, end), codec)
            start = end
        if alone:
            yield Region(Span(end, stop), own, cols)
            start = stop
        codec, end = own, stop
    if codec is not None and end > start:
        yield Region(Span(start, end), codec)
