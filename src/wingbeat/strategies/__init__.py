"""Strategies: the composition of parts, the presets, and their textual form.

>>> from wingbeat import DeAR
>>> DeAR(mb=10).plan, DeAR(mb=10).schedule
(TunedBuckets(mb=10), Decoupled())
"""

from __future__ import annotations

from wingbeat.parts.strategy import Strategy
from wingbeat.strategies.preset import Preset
from wingbeat.strategies.presets import (
    ADPSGD,
    BML,
    MGWFBP,
    OMGS,
    PRESETS,
    AllReduce,
    Auto,
    Canary,
    DeAR,
    DiLoCo,
    Geryon,
    LocalSGD,
    ParameterServer,
    Ripples,
)
from wingbeat.strategies.spelling import names, parse

__all__ = [
    "ADPSGD",
    "BML",
    "MGWFBP",
    "OMGS",
    "PRESETS",
    "AllReduce",
    "Auto",
    "Canary",
    "DeAR",
    "DiLoCo",
    "Geryon",
    "LocalSGD",
    "ParameterServer",
    "Preset",
    "Ripples",
    "Strategy",
    "names",
    "parse",
]
