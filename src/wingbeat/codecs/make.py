"""From the settings that a user writes to the codec that does it."""

from __future__ import annotations

import functools

from wingbeat.codecs.codec import Codec
from wingbeat.codecs.dense import Dense
from wingbeat.codecs.half import HalfCodec
from wingbeat.codecs.lowrank import LowRankCodec
from wingbeat.codecs.sketch import SketchCodec
from wingbeat.codecs.topk import TopKCodec, warmed_up
from wingbeat.wires import WHOLE_BITS, Coded, Half, LowRank, Sketch, TopK, kinds, own

TRIED = 40
"""Steps at the beginning in which a codec may be on trial: as long as a trial can take."""


def make(wire: Coded, step: int = 0, name: str = "") -> Codec:
    """Return the codec of ``wire`` in step ``step``, counted from 0; equal settings, equal codec.

    Only a warm-up makes it depend on the step, only groups on the parameter's ``name``. Where it
    is tried first whether the codec is faster, the warm-up begins after that: a trial has to be of
    what will travel later on, and half of its steps are exact anyway.
    """
    mine = own(wire, name)
    if isinstance(mine, TopK):
        density = mine.density
        if not mine.auto_disable or step >= min(TRIED, mine.warmup // 2):
            density = warmed_up(density, mine.warmup, step)
        return _topk(density, mine.momentum, mine.bits)
    return _constant(mine)


def all_of(wire: Coded) -> tuple[Codec, ...]:
    """Return every codec that gradients may go through, in the order of `wingbeat.wires.kinds`."""
    return tuple(map(_constant, kinds(wire)))


@functools.lru_cache(maxsize=64)
def _topk(density: float, momentum: float, bits: int) -> Codec:
    return TopKCodec(density, momentum, bits=bits)


@functools.cache
def _constant(wire: str | Coded) -> Codec:
    if isinstance(wire, str):
        assert not wire, f"{wire} is no codec"
        return Dense()
    if isinstance(wire, Half):
        return HalfCodec()
    assert isinstance(wire, Sketch | LowRank)
    if isinstance(wire, LowRank) and wire.bits == WHOLE_BITS:
        return LowRankCodec(wire.rank)
    sketch = SketchCodec(wire.bits, wire.split, wire.level, wire.feedback)
    return LowRankCodec(wire.rank, sketch) if isinstance(wire, LowRank) else sketch
