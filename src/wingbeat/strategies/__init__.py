"""Compositions of parts, the presets that return them, and how both are spelled.

>>> from wingbeat import DeAR
>>> DeAR(mb=10).compose()
Strategy(plan=TunedBuckets(mb=10), schedule=Decoupled())
"""

from __future__ import annotations

from wingbeat.strategies.presets import (
    LAGS,
    MGS,
    MGWFBP,
    OMGS,
    PRESETS,
    PSGD,
    AllReduce,
    DeAR,
    Preset,
    TopKSGD,
)
from wingbeat.strategies.spelling import names, options, parse
from wingbeat.strategies.strategy import Strategy

__all__ = [
    "LAGS",
    "MGS",
    "MGWFBP",
    "OMGS",
    "PRESETS",
    "PSGD",
    "AllReduce",
    "DeAR",
    "Preset",
    "Strategy",
    "TopKSGD",
    "names",
    "options",
    "parse",
]
