"""Compositions of parts, the presets that return them, and how both are spelled.

>>> from wingbeat import DeAR
>>> DeAR(mb=10).compose()
Strategy(plan=TunedBuckets(mb=10), schedule=Decoupled())
"""

from __future__ import annotations

from wingbeat.strategies.ako import Ako
from wingbeat.strategies.canary import Canary
from wingbeat.strategies.local import ADPSGD, DiLoCo, LocalSGD, Ripples
from wingbeat.strategies.preset import Preset
from wingbeat.strategies.presets import (
    BML,
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
from wingbeat.strategies.spelling import names, parse
from wingbeat.strategies.strategy import Strategy

__all__ = [
    "ADPSGD",
    "BML",
    "LAGS",
    "MGS",
    "MGWFBP",
    "OMGS",
    "P3",
    "PRESETS",
    "PSGD",
    "Ako",
    "AllReduce",
    "Canary",
    "DeAR",
    "DiLoCo",
    "Geryon",
    "LocalSGD",
    "ParameterServer",
    "PartitionedPS",
    "Preset",
    "Ripples",
    "Strategy",
    "TicTac",
    "TopKSGD",
    "VanillaPS",
    "names",
    "parse",
]
