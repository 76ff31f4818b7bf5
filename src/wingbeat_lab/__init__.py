"""Measurement and emulation for wingbeat; not needed for training.

``lab`` emulates a cluster on one machine. ``paced`` has models with real shapes and stated times.
``bench`` compares strategies. ``cli`` adds verbs to the ``wingbeat`` command. `baselines` has the
presets that the papers compare their systems with. wingbeat never imports this package.

>>> import wingbeat_lab
>>> wingbeat_lab.P3(mb=2)
P3(mb=2)

Names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wingbeat_lab.baselines import LAGS as LAGS
    from wingbeat_lab.baselines import MGS as MGS
    from wingbeat_lab.baselines import P3 as P3
    from wingbeat_lab.baselines import PSGD as PSGD
    from wingbeat_lab.baselines import Ako as Ako
    from wingbeat_lab.baselines import ByteScheduler as ByteScheduler
    from wingbeat_lab.baselines import PartitionedPS as PartitionedPS
    from wingbeat_lab.baselines import TicTac as TicTac
    from wingbeat_lab.baselines import TopKSGD as TopKSGD
    from wingbeat_lab.baselines import VanillaPS as VanillaPS

__all__ = [
    "LAGS",
    "MGS",
    "P3",
    "PSGD",
    "Ako",
    "ByteScheduler",
    "PartitionedPS",
    "TicTac",
    "TopKSGD",
    "VanillaPS",
]


if not TYPE_CHECKING:  # a type checker would find every name here

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'wingbeat_lab' has no attribute {name!r}")
        value = getattr(importlib.import_module("wingbeat_lab.baselines"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
