"""When buckets travel, relative to forward and backward: the values that name a schedule.

What they name are the state machines of `wingbeat.schedules`, of which each run makes its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from wingbeat.errors import UsageError
from wingbeat.parts.update import Averaged, Deferred, InRounds, UpdatePart, Whole
from wingbeat.settings import Named, Settings
from wingbeat.traits import HALVES, KEPT, LATE, LOCAL, MEANS, ONCE, OWN, ROUNDS, WHOLE, Part

PULLS = ("ready", "start")


class SchedulePart(Part, Settings):
    """When buckets travel; a subclass is a frozen dataclass.

    Attributes:
        name: what it is called where strategies are spelled.
        bound: which of `wingbeat_lab.bench.bound.BOUNDS` says how short an iteration can be.
        update: who applies the optimizer, unless a strategy says otherwise.
        of: the preset that it is known from.
    """

    name: ClassVar[str]
    bound: ClassVar[str]
    update: ClassVar[UpdatePart]
    of: ClassVar[str]

    @property
    def machine(self) -> str:
        """The state machine in `wingbeat.schedules.BY_NAME`."""
        return self.name


@dataclass(frozen=True, kw_only=True, repr=False)
class WaitFree(SchedulePart):
    """Wait-free backpropagation: whole all-reduces while backward goes on, as DDP does (WFBP)."""

    name: ClassVar[str] = "wfbp"
    bound: ClassVar[str] = "whole"
    update: ClassVar[UpdatePart] = Whole()
    of: ClassVar[str] = "AllReduce"
    has: ClassVar[frozenset[str]] = frozenset({WHOLE, ONCE})


@dataclass(frozen=True, kw_only=True, repr=False)
class Decoupled(SchedulePart):
    """Reduce-scatter under backward, all-gather under the next forward (DeAR, section III)."""

    name: ClassVar[str] = "dear"
    bound: ClassVar[str] = "halves"
    update: ClassVar[UpdatePart] = Deferred()
    of: ClassVar[str] = "DeAR"
    has: ClassVar[frozenset[str]] = frozenset({HALVES, LATE})


@dataclass(frozen=True, kw_only=True, repr=False)
class Served(SchedulePart):
    """Pushed under backward, waited for when the next forward needs it (Geryon, section II).

    Args:
        pull: when a sum comes back: ``"ready"``, as soon as it is complete; or ``"start"``, asked
            for when the next iteration starts, as in the paper's Eqs. 1 to 5.

    Raises:
        UsageError: another name.
    """

    name: ClassVar[str] = "served"
    bound: ClassVar[str] = "late"
    update: ClassVar[UpdatePart] = Deferred()
    of: ClassVar[str] = "Geryon"
    has: ClassVar[frozenset[str]] = frozenset({ONCE, LATE})

    pull: str = "ready"

    def __post_init__(self) -> None:
        self.check_name("pull", PULLS)

    @property
    def machine(self) -> str:
        """The state machine in `wingbeat.schedules.BY_NAME`."""
        return "served" if self.pull == "ready" else "served_at_start"

    @property
    def needs(self) -> frozenset[str]:
        """Who keeps the sums until they are pulled."""
        return frozenset() if self.pull == "ready" else frozenset({KEPT})


@dataclass(frozen=True, kw_only=True, repr=False)
class Stale(SchedulePart):
    """Sent under backward; sums are applied when they have come, and nobody waits (Canary, 5.3)."""

    name: ClassVar[str] = "stale"
    bound: ClassVar[str] = "stale"
    update: ClassVar[UpdatePart] = InRounds()
    of: ClassVar[str] = "Canary"
    has: ClassVar[frozenset[str]] = frozenset({OWN})

    @property
    def needs(self) -> frozenset[str]:
        """Sums that come when they come."""
        return frozenset({ROUNDS})


@dataclass(frozen=True, kw_only=True, repr=False)
class Local(SchedulePart):
    """Steps on this worker's own gradients, and averages of models between them (Ripples, 3.2).

    Args:
        every: steps from one average to the next. Where the plan has several fragments, each has a
            turn of its own in that time.
        delay: steps after which an average is taken over, under which it is made; 0: it is waited
            for in the step that begins it.

    Raises:
        UsageError: a number out of range.
    """

    name: ClassVar[str] = "local"
    bound: ClassVar[str] = "local"
    update: ClassVar[UpdatePart] = Averaged()
    of: ClassVar[str] = "Ripples"
    has: ClassVar[frozenset[str]] = frozenset({LOCAL})

    every: int = 1
    delay: int = 0

    def __post_init__(self) -> None:
        check_local(self)

    @property
    def needs(self) -> frozenset[str]:
        """Somebody to average with."""
        return frozenset({MEANS})


def check_local(options: Any) -> None:
    """Raise a `UsageError` unless ``every`` and ``delay`` are numbers of steps that fit."""
    options.check_count("every", 1, 1_000_000)
    options.check_count("delay", 0, 1_000_000)
    if options.delay > options.every:
        raise UsageError(
            f"{type(options).__name__}(every={options.every}, delay={options.delay}): an average "
            f"is taken over before the next begins; allowed is delay=0 to {options.every}"
        )


BY_NAME: Mapping[str, Named[SchedulePart]] = {
    WaitFree.name: Named(WaitFree),
    Decoupled.name: Named(Decoupled),
    Served.name: Named(Served, "pull", str),
    Stale.name: Named(Stale),
    Local.name: Named(Local, "every", int),
}
