"""When buckets are sent, relative to forward and backward.

A part names a state machine of `wingbeat.schedules`, of which each run creates its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from wingbeat.parts.update import Deferred, UpdatePart, Whole
from wingbeat.settings import Settings
from wingbeat.traits import HALVES, LATE, ONCE, WHOLE, Part


class SchedulePart(Part, Settings):
    """When buckets are sent; a subclass is a frozen dataclass.

    Attributes:
        name: its name in textual form.
        bound: the lower bound of an iteration, a name in `wingbeat_lab.bench.bound.BOUNDS`.
        update: the default for the strategy's update.
        of: the preset that is known for this schedule.
    """

    name: ClassVar[str]
    bound: ClassVar[str]
    update: ClassVar[UpdatePart]
    of: ClassVar[str]

    @property
    def machine(self) -> str:
        """The name of the state machine in `wingbeat.schedules.BY_NAME`."""
        return self.name


@dataclass(frozen=True, kw_only=True, repr=False)
class WaitFree(SchedulePart):
    """Wait-free backpropagation: all-reduces during backward, as in DDP (WFBP)."""

    name: ClassVar[str] = "wfbp"
    bound: ClassVar[str] = "whole"
    update: ClassVar[UpdatePart] = Whole()
    of: ClassVar[str] = "AllReduce"
    has: ClassVar[frozenset[str]] = frozenset({WHOLE, ONCE})


@dataclass(frozen=True, kw_only=True, repr=False)
class Decoupled(SchedulePart):
    """Reduce-scatter during backward, all-gather during the next forward (DeAR, section III)."""

    name: ClassVar[str] = "dear"
    bound: ClassVar[str] = "halves"
    update: ClassVar[UpdatePart] = Deferred()
    of: ClassVar[str] = "DeAR"
    has: ClassVar[frozenset[str]] = frozenset({HALVES, LATE})
