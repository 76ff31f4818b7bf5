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
    from wingbeat.strategies import AllReduce as AllReduce
    from wingbeat.strategies import DeAR as DeAR
    from wingbeat.sync import distribute as distribute
    from wingbeat.sync import release as release
    from wingbeat.transport import init as init
    from wingbeat.transport import shutdown as shutdown
    from wingbeat.wires import LowRank as LowRank
    from wingbeat.wires import Sketch as Sketch
    from wingbeat.wires import TopK as TopK

_HOME = {
    "AllReduce": "wingbeat.strategies",
    "DeAR": "wingbeat.strategies",
    "LowRank": "wingbeat.wires",
    "Sketch": "wingbeat.wires",
    "TopK": "wingbeat.wires",
    "distribute": "wingbeat.sync",
    "init": "wingbeat.transport",
    "release": "wingbeat.sync",
    "shutdown": "wingbeat.transport",
}


__all__ = [
    "AllReduce",
    "DeAR",
    "LowRank",
    "Sketch",
    "TopK",
    "distribute",
    "init",
    "release",
    "shutdown",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "integrations":
        return importlib.import_module("wingbeat.integrations")
    if name not in _HOME:
        raise AttributeError(f"module 'wingbeat' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
