"""From the settings that a user writes to the codec that does it."""

from __future__ import annotations

import functools

from wingbeat.codecs.codec import Codec
from wingbeat.codecs.half import HalfCodec
from wingbeat.codecs.lowrank import LowRankCodec
from wingbeat.codecs.sketch import SketchCodec
from wingbeat.codecs.topk import TopKCodec, warmed_up
from wingbeat.wires import Coded, Half, LowRank, Sketch, TopK

TRIED = 40
"""Steps at the beginning in which a codec may be on trial: as long as a trial can take."""


def make(wire: Coded, step: int = 0, name: str = "") -> Codec:
    """Return the codec of ``wire`` in step ``step``, counted from 0; equal settings, equal codec.

    Only a warm-up makes it depend on the step, only groups on the parameter's ``name``. Where it
    is tried first whether the codec is faster, the warm-up begins after that: a trial has to be of
    what will travel later on, and half of its steps are exact anyway.
    """
    if isinstance(wire, TopK):
        density = wire.density_of(name)
        if not wire.auto_disable or step >= min(TRIED, wire.warmup // 2):
            density = warmed_up(density, wire.warmup, step)
        return _topk(density, wire.momentum)
    return _constant(wire)


@functools.lru_cache(maxsize=64)
def _topk(density: float, momentum: float) -> Codec:
    return TopKCodec(density, momentum)


@functools.cache
def _constant(wire: Coded) -> Codec:
    if isinstance(wire, Half):
        return HalfCodec()
    if isinstance(wire, LowRank):
        return LowRankCodec(wire.rank, SketchCodec(wire.bits, feedback=wire.feedback))
    assert isinstance(wire, Sketch)
    return SketchCodec(wire.bits, wire.split, wire.level, wire.feedback)
