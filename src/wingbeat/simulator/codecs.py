"""What gradients are on the links, and the processor time to encode and decode them.

Sizes are those of the codecs that training uses. Seconds are for each byte of float32 on one core
of an AMD EPYC: of `TopK` from ``docs/results/codecs.json`` (2026-11-26); of `Sketch` by
``benchmarks/codecs.py --kernels native --numel 1500000``, a worker's part of a bucket of 25 MB
(2026-11-27); of a cast of 32 MB the shortest of five calls, in CPU time. Low rank: CPU time of the
four steps of `wingbeat.codecs.lowrank.Round` for all matrices of resnet50, vgg16 (a quarter) and
bert_base (a quarter) in the order of training, the least of six turns, between the lines of ranks 1
and 4; what each matrix costs, from those of resnet50 at a scale of 0.05.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from wingbeat import codecs
from wingbeat.codecs.codec import Codec, Dense, SketchCodec
from wingbeat.codecs.coding import Region, regions
from wingbeat.codecs.lowrank import LowRankCodec
from wingbeat.codecs.topk import TopKCodec
from wingbeat.compression import Coded, for_parameter, options_of
from wingbeat.simulator.model import ITEMSIZE
from wingbeat.types import Span

Parameters = Sequence[tuple[str, tuple[int, ...]]]
"""Names and shapes of a bucket's parameters."""


class Seconds(NamedTuple):
    """Seconds to encode and to decode a byte of float32."""

    encode: float
    decode: float


CAST = Seconds(0.065e-9, 0.149e-9)
"""A cast to bfloat16, and back with a sum. Scaled float16 is taken to cost the same."""

SKETCH = Seconds(1 / 2.14e9, 1 / 12.6e9)
"""An 8-bit sketch with its residual."""

SKETCH_4 = Seconds(1 / 2.19e9, 1 / 8.56e9)
"""A 4-bit sketch with its residual."""

ADDED = 1 / 3
"""Share of the seconds to decode a gathered payload that the second and later ones take.

These are added, and only their own elements are written: 0.010 to 0.033 ns for each byte of float32
at a density of 0.01, where the first took 0.027 to 0.065 (`TopKCodec`, 0.35 to 6 million elements,
2026-11-27).
"""

_FEW_BITS = 4

_FINAL = 1 << 30
"""A step after all warm-ups."""


def seconds_of(codec: Codec) -> Seconds:
    """Return the seconds of a codec."""
    match codec:
        case Dense():
            return Seconds(0.0, 0.0)
        case SketchCodec():
            return SKETCH if codec.bits > _FEW_BITS else SKETCH_4
        case TopKCodec():
            # Lines through the figures at densities of 0.001 and 0.01.
            density = codec.density
            return Seconds(0.105e-9 + 7.1e-9 * density, 0.030e-9 + 2.5e-9 * density)
        case LowRankCodec():
            return Seconds(2.7e-9, 0.037e-9 + 0.026e-9 * codec.rank)
    return CAST


class Packing(NamedTuple):
    """How chunks of a bucket are packed: cast, or encoded by ``coding``."""

    coding: codecs.Coding | None = None

    @property
    def bytes_per_element(self) -> float:
        """Approximate; 0 if blocks should not be divided."""
        return 2.0 if self.coding is None else self.coding.bytes_per_element

    def nbytes(self, span: Span) -> int:
        """Return the bytes of a packed chunk."""
        return 2 * len(span) if self.coding is None else self.coding.room(span)

    def seconds(self, span: Span) -> Seconds:
        """Return the seconds to pack and to unpack a chunk."""
        if self.coding is None:
            return _times(CAST, len(span))
        return _of_regions(self.coding.regions, span)


def _times(each: Seconds, numel: int) -> Seconds:
    return Seconds(each.encode * numel * ITEMSIZE, each.decode * numel * ITEMSIZE)


@lru_cache(maxsize=1 << 16)
def _of_regions(parts: tuple[Region, ...], span: Span) -> Seconds:
    encode = decode = 0.0
    for region in parts:
        numel = min(span.stop, region.span.stop) - max(span.start, region.span.start)
        if numel > 0:
            seconds = _times(seconds_of(region.codec), numel)
            encode += seconds.encode
            decode += seconds.decode
    return Seconds(encode, decode)


class Slowed(NamedTuple):
    """Seconds of a codec: those of a processor, and those in which it is idle after them."""

    busy: float = 0.0
    idle: float = 0.0

    @property
    def seconds(self) -> float:
        """All of them."""
        return self.busy + self.idle


def slowed(seconds: float, factor: float, idle: float, fixed_s: float = 0.0) -> Slowed:
    """Return ``seconds`` times ``factor``, with a share of ``idle``, and fixed ones."""
    whole = seconds * factor
    return Slowed(fixed_s + whole * (1 - idle), whole * idle)


@dataclass(frozen=True, slots=True)
class FactorsSent:
    """The two sums of a bucket's low-rank factors, and the seconds of their arithmetic.

    Attributes:
        first: elements of the first all-reduce: dense gradients and the thin factors.
        second: elements of the second one.
        begin: training thread, before the first.
        between: a thread of its own, between the two.
        keep: the same thread, while the second is on the way.
        end: training thread, when the result is needed.
    """

    first: int
    second: int
    begin: Slowed
    between: Slowed
    keep: Slowed
    end: Slowed


def packing_of(wire: str | Coded, parameters: Parameters) -> Packing | None:
    """Return how chunks of a bucket are packed; None: they are sent as they are."""
    if isinstance(wire, str):
        return Packing() if wire else None
    return Packing(codecs.Coding(list(regions(wire, parameters, _FINAL))))


_FIXED_S = (17e-6, 48e-6, 35e-6, 60e-6)
_OF_BYTE = (
    (0.135e-9, 0.030e-9),
    (0.035e-9, 0.042e-9),
    (0.135e-9, 0.022e-9),
    (0.025e-9, 0.047e-9),
)
"""Seconds of the four steps of low rank: for each matrix; for each byte, and times the rank."""


def factors_sent(wire: Coded, parameters: Parameters, factor: float, idle: float) -> FactorsSent:
    """Return the factors of a bucket, whose codec is summed.

    ``factor`` applies to the seconds that grow with a matrix, not to those of each; the processor
    is idle in a share of them.
    """
    beside = thin = wide = matrices = 0
    grown = [0.0] * len(_OF_BYTE)
    for name, shape in parameters:
        options = options_of(for_parameter(wire, name))
        rows, cols = options.matrix_of(shape)
        numel, rank = math.prod(shape), options.rank
        if not rows:
            beside += numel
            continue
        thin, wide, matrices = thin + rank * rows, wide + rank * cols, matrices + 1
        for step, (once, of_rank) in enumerate(_OF_BYTE):
            grown[step] += numel * ITEMSIZE * (once + of_rank * rank)
    steps = (
        slowed(seconds, factor, idle, matrices * fixed_s)
        for seconds, fixed_s in zip(grown, _FIXED_S, strict=True)
    )
    return FactorsSent(beside + thin + 1, wide, *steps)
