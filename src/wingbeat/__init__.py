"""wingbeat: data-parallel PyTorch training that does not wait for the network.

>>> import wingbeat
>>> wingbeat.DeAR(mb=10)
DeAR(mb=10)

Names are loaded on first use, so that the command line starts without importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wingbeat.engine import consensus as consensus
    from wingbeat.engine import distribute as distribute
    from wingbeat.engine import flush as flush
    from wingbeat.engine import join as join
    from wingbeat.engine import no_sync as no_sync
    from wingbeat.engine import release as release
    from wingbeat.session import CanarySession as CanarySession
    from wingbeat.strategies import ADPSGD as ADPSGD
    from wingbeat.strategies import BML as BML
    from wingbeat.strategies import LAGS as LAGS
    from wingbeat.strategies import MGS as MGS
    from wingbeat.strategies import MGWFBP as MGWFBP
    from wingbeat.strategies import OMGS as OMGS
    from wingbeat.strategies import P3 as P3
    from wingbeat.strategies import PSGD as PSGD
    from wingbeat.strategies import Ako as Ako
    from wingbeat.strategies import AllReduce as AllReduce
    from wingbeat.strategies import Canary as Canary
    from wingbeat.strategies import DeAR as DeAR
    from wingbeat.strategies import DiLoCo as DiLoCo
    from wingbeat.strategies import Geryon as Geryon
    from wingbeat.strategies import LocalSGD as LocalSGD
    from wingbeat.strategies import ParameterServer as ParameterServer
    from wingbeat.strategies import PartitionedPS as PartitionedPS
    from wingbeat.strategies import Ripples as Ripples
    from wingbeat.strategies import Strategy as Strategy
    from wingbeat.strategies import TicTac as TicTac
    from wingbeat.strategies import TopKSGD as TopKSGD
    from wingbeat.strategies import VanillaPS as VanillaPS
    from wingbeat.transport import init as init
    from wingbeat.transport import on_terminate as on_terminate
    from wingbeat.transport import shutdown as shutdown
    from wingbeat.types import Group as Group
    from wingbeat.wires import LowRank as LowRank
    from wingbeat.wires import Sketch as Sketch
    from wingbeat.wires import TopK as TopK

_HOME = {
    "VanillaPS": "wingbeat.strategies",
    "TicTac": "wingbeat.strategies",
    "PartitionedPS": "wingbeat.strategies",
    "ParameterServer": "wingbeat.strategies",
    "P3": "wingbeat.strategies",
    "Geryon": "wingbeat.strategies",
    "Ako": "wingbeat.strategies",
    "Canary": "wingbeat.strategies",
    "ADPSGD": "wingbeat.strategies",
    "AllReduce": "wingbeat.strategies",
    "DiLoCo": "wingbeat.strategies",
    "LocalSGD": "wingbeat.strategies",
    "Ripples": "wingbeat.strategies",
    "CanarySession": "wingbeat.session",
    "BML": "wingbeat.strategies",
    "DeAR": "wingbeat.strategies",
    "Group": "wingbeat.types",
    "LAGS": "wingbeat.strategies",
    "LowRank": "wingbeat.wires",
    "MGS": "wingbeat.strategies",
    "MGWFBP": "wingbeat.strategies",
    "OMGS": "wingbeat.strategies",
    "PSGD": "wingbeat.strategies",
    "Sketch": "wingbeat.wires",
    "Strategy": "wingbeat.strategies",
    "TopK": "wingbeat.wires",
    "TopKSGD": "wingbeat.strategies",
    "consensus": "wingbeat.engine",
    "distribute": "wingbeat.engine",
    "flush": "wingbeat.engine",
    "init": "wingbeat.transport",
    "join": "wingbeat.engine",
    "no_sync": "wingbeat.engine",
    "on_terminate": "wingbeat.transport",
    "release": "wingbeat.engine",
    "shutdown": "wingbeat.transport",
}


__all__ = [
    "ADPSGD",
    "BML",
    "LAGS",
    "MGS",
    "MGWFBP",
    "OMGS",
    "P3",
    "PSGD",
    "Ako",
    "AllReduce",
    "Canary",
    "CanarySession",
    "DeAR",
    "DiLoCo",
    "Geryon",
    "Group",
    "LocalSGD",
    "LowRank",
    "ParameterServer",
    "PartitionedPS",
    "Ripples",
    "Sketch",
    "Strategy",
    "TicTac",
    "TopK",
    "TopKSGD",
    "VanillaPS",
    "consensus",
    "distribute",
    "flush",
    "init",
    "join",
    "no_sync",
    "on_terminate",
    "release",
    "shutdown",
]
__version__ = "0.1.0"


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
