"""The parts of a strategy: typed, frozen values with traits.

>>> from wingbeat import Strategy, parts
>>> Strategy(plan=parts.Merged(), compression=parts.Sketch(bits=4), schedule=parts.Decoupled())
Strategy(plan=Merged(), compression=Sketch(bits=4), schedule=Decoupled())
"""

from __future__ import annotations

from wingbeat.compression import Half, LowRank, Sketch, TopK
from wingbeat.parts.exchange import Bounded, Partial, Servers
from wingbeat.parts.partners import Groups, Pairs, PartnersPart
from wingbeat.parts.plan import (
    Colayers,
    Elements,
    FixedBuckets,
    Layers,
    Merged,
    OneBucket,
    PerTensor,
    PlanPart,
    TunedBuckets,
)
from wingbeat.parts.schedule import Decoupled, Local, SchedulePart, Served, Stale, WaitFree
from wingbeat.parts.update import (
    Averaged,
    Deferred,
    InRounds,
    OnServers,
    Outer,
    Sharded,
    UpdatePart,
    Whole,
)
from wingbeat.topologies import BCube, Doubling, Mesh, Ring
from wingbeat.traits import Part, Traits

__all__ = [
    "Averaged",
    "BCube",
    "Bounded",
    "Colayers",
    "Decoupled",
    "Deferred",
    "Doubling",
    "Elements",
    "FixedBuckets",
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
    "Partial",
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
