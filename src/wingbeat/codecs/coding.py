"""How one flat buffer travels: each region of it by a codec of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from wingbeat.codecs.codec import Codec
from wingbeat.codecs.topk import TopKCodec
from wingbeat.observe import meter
from wingbeat.types import Span

ALIGNMENT = 4
"""Bytes. Each region's payload begins at a multiple, so that it can be read as float32."""


@dataclass(frozen=True)
class Region:
    """Elements that travel by one codec; with ``cols``, rows of a matrix of that many columns."""

    span: Span
    codec: Codec
    cols: int = 0


@dataclass(frozen=True)
class _Part:
    """What a span and a region have in common, or the whole rows of that."""

    span: Span
    codec: Codec
    cols: int
    nbytes: int


class Coding:
    """Encodes and decodes any span of a flat buffer, float of any width.

    Both ends know the regions, so a payload's size and meaning follow from its span alone.
    """

    def __init__(self, regions: Sequence[Region]) -> None:
        self.regions = tuple(regions)
        self._parts: dict[Span, tuple[_Part, ...]] = {}

    @property
    def bytes_per_element(self) -> float:
        """About how many bytes an element of the largest region takes on the wire."""
        largest = max(self.regions, key=lambda region: len(region.span))
        if any(region.cols for region in self.regions):
            return 0.0  # matrices are worth more the fewer pieces they are in
        return largest.codec.bytes_per_element

    def room(self, span: Span) -> int:
        """Return the exact size of the payload of ``span`` in bytes."""
        return sum(_aligned(part.nbytes) for part in self._parts_of(span))

    def cut(self, span: Span) -> Coding:
        """Return the coding of ``buffer[span]`` by itself; it makes the same payload of it."""
        start = span.start
        return Coding(
            [
                Region(Span(part.span.start - start, part.span.stop - start), part.codec, part.cols)
                for part in self._parts_of(span)
            ]
        )

    def encode(
        self,
        buffer: torch.Tensor,
        span: Span,
        payload: torch.Tensor,
        residual: torch.Tensor | None = None,
        velocity: torch.Tensor | None = None,
    ) -> None:
        """Write ``buffer[span]`` into ``payload``.

        ``residual`` is as long as the buffer, and so is the ``velocity`` of momentum correction.
        Where a codec keeps none, what another has left there goes along, once.
        """
        begin = time.monotonic_ns()
        for part, room in self._rooms(span, payload):
            x = buffer[part.span.start : part.span.stop].to(torch.float32)
            own = None if residual is None else residual[part.span.start : part.span.stop]
            if own is not None and not part.codec.feedback:
                x = x + own
                own.zero_()
                own = None
            if velocity is not None and isinstance(part.codec, TopKCodec):
                moving = velocity[part.span.start : part.span.stop]
                part.codec.encode(x, room, residual=own, velocity=moving)
            else:
                part.codec.encode(x, room, residual=own, cols=part.cols)
        meter.codec.add(time.monotonic_ns() - begin)

    def decode(
        self, payload: torch.Tensor, buffer: torch.Tensor, span: Span, *, add: bool = False
    ) -> None:
        """Write what ``payload`` stands for into ``buffer[span]``, or add it.

        Raises:
            ValueError: no encoder can have written this.
        """
        begin = time.monotonic_ns()
        for part, room in self._rooms(span, payload):
            out = buffer[part.span.start : part.span.stop]
            if out.dtype is torch.float32:
                part.codec.decode(room, out, add=add, cols=part.cols)
                continue
            wide = out.float() if add else torch.empty_like(out, dtype=torch.float32)
            part.codec.decode(room, wide, add=add, cols=part.cols)
            out.copy_(wide)
        meter.codec.add(time.monotonic_ns() - begin)

    def _rooms(self, span: Span, payload: torch.Tensor) -> Iterator[tuple[_Part, torch.Tensor]]:
        start = 0
        for part in self._parts_of(span):
            yield part, payload[start : start + part.nbytes]
            start += _aligned(part.nbytes)

    def _parts_of(self, span: Span) -> tuple[_Part, ...]:
        known = self._parts.get(span)
        if known is None:
            known = self._parts[span] = tuple(self._cut(span))
        return known

    def _cut(self, span: Span) -> Iterator[_Part]:
        for region in self.regions:
            common = Span(max(span.start, region.span.start), min(span.stop, region.span.stop))
            if common:
                yield from _by_rows(region, common)


def _by_rows(region: Region, span: Span) -> Iterator[_Part]:
    """Yield the span in up to three parts: the end of a row, whole rows, the begin of a row."""
    first, last = span.start, span.stop
    if region.cols:
        origin = region.span.start
        first = origin + -(-(span.start - origin) // region.cols) * region.cols
        last = origin + (span.stop - origin) // region.cols * region.cols
        if first >= last:
            first = last = span.stop
    pieces = [
        (Span(span.start, first), 0),
        (Span(first, last), region.cols),
        (Span(last, span.stop), 0),
    ]
    for piece, cols in pieces:
        if piece:
            nbytes = region.codec.nbytes(len(piece), cols)
            yield _Part(piece, region.codec, cols, nbytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
