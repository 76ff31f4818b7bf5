"""When buckets travel, relative to forward and backward: the values that name a schedule.

What they name are the state machines of `wingbeat.schedules`, of which each run makes its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from wingbeat.parts.update import Deferred, UpdatePart, Whole
from wingbeat.settings import Named, Settings
from wingbeat.traits import HALVES, WHOLE, Part


class SchedulePart(Part, Settings):
    """When buckets travel; a subclass is a frozen dataclass.

    Attributes:
        name: of the state machine in `wingbeat.schedules.BY_NAME`.
        bound: which of `wingbeat.bench.bound.BOUNDS` says how short an iteration can be.
        update: who applies the optimizer, unless a strategy says otherwise.
        of: the preset that it is known from.
    """

    name: ClassVar[str]
    bound: ClassVar[str]
    update: ClassVar[UpdatePart]
    of: ClassVar[str]


@dataclass(frozen=True, kw_only=True, repr=False)
class WaitFree(SchedulePart):
    """Wait-free backpropagation: whole all-reduces while backward goes on, as DDP does (WFBP)."""

    name: ClassVar[str] = "wfbp"
    bound: ClassVar[str] = "whole"
    update: ClassVar[UpdatePart] = Whole()
    of: ClassVar[str] = "AllReduce"
    has: ClassVar[frozenset[str]] = frozenset({WHOLE})


@dataclass(frozen=True, kw_only=True, repr=False)
class Decoupled(SchedulePart):
    """Reduce-scatter under backward, all-gather under the next forward (DeAR, section III)."""

    name: ClassVar[str] = "dear"
    bound: ClassVar[str] = "halves"
    update: ClassVar[UpdatePart] = Deferred()
    of: ClassVar[str] = "DeAR"
    has: ClassVar[frozenset[str]] = frozenset({HALVES})


BY_NAME: Mapping[str, Named[SchedulePart]] = {
    part.name: Named(part) for part in (WaitFree, Decoupled)
}
