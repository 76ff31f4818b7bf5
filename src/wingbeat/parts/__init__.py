"""The parts of a strategy: typed, frozen values with traits.

>>> from wingbeat import Strategy, parts
>>> Strategy(plan=parts.Merged(), compression=parts.Sketch(bits=4), schedule=parts.Decoupled())
Strategy(plan=Merged(), compression=Sketch(bits=4), schedule=Decoupled())

The parts of a method are defined in its folder, and loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from wingbeat.compression import Half, LowRank, Sketch, TopK
from wingbeat.parts.plan import (
    Chosen,
    Colayers,
    Elements,
    FixedBuckets,
    Fragments,
    Layers,
    Merged,
    OneBucket,
    PerTensor,
    PlanPart,
    TunedBuckets,
)
from wingbeat.parts.schedule import Decoupled, SchedulePart, WaitFree
from wingbeat.parts.update import Deferred, Sharded, UpdatePart, Whole
from wingbeat.topologies import BCube, Doubling, Mesh, Ring
from wingbeat.traits import ExchangePart, Part, Traits

if TYPE_CHECKING:
    from wingbeat.methods.bounded_staleness.options import Bounded, InRounds, Stale
    from wingbeat.methods.elastic.options import Elastic
    from wingbeat.methods.model_averaging.options import (
        Averaged,
        Groups,
        Local,
        Outer,
        Pairs,
        PartnersPart,
    )
    from wingbeat.methods.parameter_server.options import OnServers, Served, Servers

_METHODS = {
    "methods.elastic": ("Elastic",),
    "methods.bounded_staleness": ("Bounded", "InRounds", "Stale"),
    "methods.model_averaging": ("Averaged", "Groups", "Local", "Outer", "Pairs", "PartnersPart"),
    "methods.parameter_server": ("OnServers", "Served", "Servers"),
}
_HOME = {name: f"wingbeat.{home}.options" for home, names in _METHODS.items() for name in names}

__all__ = [
    "Averaged",
    "BCube",
    "Bounded",
    "Chosen",
    "Colayers",
    "Decoupled",
    "Deferred",
    "Doubling",
    "Elastic",
    "Elements",
    "ExchangePart",
    "FixedBuckets",
    "Fragments",
    "Groups",
    "Half",
    "InRounds",
    "Layers",
    "Local",
    "LowRank",
    "Merged",
    "Mesh",
    "OnServers",
    "OneBucket",
    "Outer",
    "Pairs",
    "Part",
    "PartnersPart",
    "PerTensor",
    "PlanPart",
    "Ring",
    "SchedulePart",
    "Served",
    "Servers",
    "Sharded",
    "Sketch",
    "Stale",
    "TopK",
    "Traits",
    "TunedBuckets",
    "UpdatePart",
    "WaitFree",
    "Whole",
]


if not TYPE_CHECKING:  # a type checker would find every name here

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
