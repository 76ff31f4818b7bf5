"""wingbeat: data-parallel PyTorch training over slow networks.

>>> import wingbeat
>>> wingbeat.DeAR(mb=10)
DeAR(mb=10)

This module has the names for training scripts. Further names are in the packages
`wingbeat.strategies`, `wingbeat.parts`, `wingbeat.errors`, `wingbeat.simulator` and others. Names
are loaded on first use, so that the command line starts without importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wingbeat.compression import LowRank as LowRank
    from wingbeat.compression import Sketch as Sketch
    from wingbeat.compression import TopK as TopK
    from wingbeat.engine.api import clip_grad_norm_ as clip_grad_norm_
    from wingbeat.engine.api import count_tokens as count_tokens
    from wingbeat.engine.api import distribute as distribute
    from wingbeat.engine.api import join as join
    from wingbeat.engine.api import no_sync as no_sync
    from wingbeat.engine.api import release as release
    from wingbeat.engine.api import steps_made as steps_made
    from wingbeat.engine.api import synchronize as synchronize
    from wingbeat.strategies import ADPSGD as ADPSGD
    from wingbeat.strategies import BML as BML
    from wingbeat.strategies import OMGS as OMGS
    from wingbeat.strategies import AllReduce as AllReduce
    from wingbeat.strategies import Auto as Auto
    from wingbeat.strategies import Canary as Canary
    from wingbeat.strategies import DeAR as DeAR
    from wingbeat.strategies import DiLoCo as DiLoCo
    from wingbeat.strategies import Geryon as Geryon
    from wingbeat.strategies import LocalSGD as LocalSGD
    from wingbeat.strategies import ParameterServer as ParameterServer
    from wingbeat.strategies import Ripples as Ripples
    from wingbeat.strategies import Strategy as Strategy
    from wingbeat.transport import init as init
    from wingbeat.transport import shutdown as shutdown
    from wingbeat.types import Group as Group

_STRATEGIES = (
    *(
        "ADPSGD",
        "BML",
        "OMGS",
        "AllReduce",
        "Auto",
        "Canary",
        "DeAR",
        "DiLoCo",
        "Geryon",
        "LocalSGD",
    ),
    *("ParameterServer", "Ripples", "Strategy"),
)
_HOME = {
    **dict.fromkeys(_STRATEGIES, "wingbeat.strategies"),
    **dict.fromkeys(("LowRank", "Sketch", "TopK"), "wingbeat.compression"),
    **dict.fromkeys(
        (
            "clip_grad_norm_",
            "count_tokens",
            "distribute",
            "join",
            "no_sync",
            "release",
            "steps_made",
            "synchronize",
        ),
        "wingbeat.engine.api",
    ),
    **dict.fromkeys(("init", "shutdown"), "wingbeat.transport"),
    "Group": "wingbeat.types",
}

__all__ = [
    "ADPSGD",
    "BML",
    "OMGS",
    "AllReduce",
    "Auto",
    "Canary",
    "DeAR",
    "DiLoCo",
    "Geryon",
    "Group",
    "LocalSGD",
    "LowRank",
    "ParameterServer",
    "Ripples",
    "Sketch",
    "Strategy",
    "TopK",
    "clip_grad_norm_",
    "count_tokens",
    "distribute",
    "init",
    "join",
    "no_sync",
    "release",
    "shutdown",
    "steps_made",
    "synchronize",
]
__version__ = "0.1.0"


if not TYPE_CHECKING:  # a type checker would find every name here

    def __getattr__(name: str) -> Any:
        if name in ("integrations", "parts"):
            return importlib.import_module(f"wingbeat.{name}")
        if name not in _HOME:
            raise AttributeError(f"module 'wingbeat' has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
