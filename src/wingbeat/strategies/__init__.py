"""Compositions of parts, the presets that return them, and how both are spelled.

>>> from wingbeat import DeAR
>>> DeAR(mb=10).compose()
Strategy(plan=TunedBuckets(mb=10), schedule=Decoupled())
"""

from __future__ import annotations

from wingbeat.strategies.preset import Preset
from wingbeat.strategies.presets import (
    LAGS,
    MGS,
    MGWFBP,
    OMGS,
    PRESETS,
    PSGD,
    AllReduce,
    DeAR,
    TopKSGD,
)
from wingbeat.strategies.served import (
    P3,
    Geryon,
    ParameterServer,
    PartitionedPS,
    TicTac,
    VanillaPS,
)
from wingbeat.strategies.spelling import names, options, parse
from wingbeat.strategies.strategy import Strategy

__all__ = [
    "LAGS",
    "MGS",
    "MGWFBP",
    "OMGS",
    "P3",
    "PRESETS",
    "PSGD",
    "AllReduce",
    "DeAR",
    "Geryon",
    "ParameterServer",
    "PartitionedPS",
    "Preset",
    "Strategy",
    "TicTac",
    "TopKSGD",
    "VanillaPS",
    "names",
    "options",
    "parse",
]
