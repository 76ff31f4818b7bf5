"""Strategies: the composition of parts, the presets, and their textual form.

>>> from wingbeat import DeAR
>>> DeAR(mb=10).compose()
Strategy(plan=TunedBuckets(mb=10), schedule=Decoupled())
"""

from __future__ import annotations

from wingbeat.strategies.canary import Canary
from wingbeat.strategies.local import ADPSGD, DiLoCo, LocalSGD, Ripples
from wingbeat.strategies.preset import Preset
from wingbeat.strategies.presets import (
    BML,
    MGWFBP,
    OMGS,
    PRESETS,
    AllReduce,
    DeAR,
)
from wingbeat.strategies.served import Geryon, ParameterServer
from wingbeat.strategies.spelling import names, parse
from wingbeat.strategies.strategy import Strategy

__all__ = [
    "ADPSGD",
    "BML",
    "MGWFBP",
    "OMGS",
    "PRESETS",
    "AllReduce",
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
