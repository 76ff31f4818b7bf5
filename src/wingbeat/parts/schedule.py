"""When buckets are sent, relative to forward and backward.

A part names a state machine of `wingbeat.schedules`, of which each run creates its own.
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


@dataclass(frozen=True, kw_only=True, repr=False)
class Served(SchedulePart):
    """Gradients are pushed during backward; the next forward awaits the sums (Geryon, section II).

    Args:
        pull: when a sum is sent to the workers: ``"ready"``, as soon as it is complete; or
            ``"start"``, requested when the next iteration starts, as in the paper's Eqs. 1 to 5.

    Raises:
        UsageError: ``pull`` has another value.
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
        """The name of the state machine in `wingbeat.schedules.BY_NAME`."""
        return "served" if self.pull == "ready" else "served_at_start"

    @property
    def needs(self) -> frozenset[str]:
        """With ``pull="start"``, an exchange that keeps sums until they are pulled."""
        return frozenset() if self.pull == "ready" else frozenset({KEPT})


@dataclass(frozen=True, kw_only=True, repr=False)
class Stale(SchedulePart):
    """Gradients are sent during backward; sums are applied as they arrive (Canary, 5.3)."""

    name: ClassVar[str] = "stale"
    bound: ClassVar[str] = "stale"
    update: ClassVar[UpdatePart] = InRounds()
    of: ClassVar[str] = "Canary"
    has: ClassVar[frozenset[str]] = frozenset({OWN})

    @property
    def needs(self) -> frozenset[str]:
        """An exchange with sums in rounds."""
        return frozenset({ROUNDS})


@dataclass(frozen=True, kw_only=True, repr=False)
class Local(SchedulePart):
    """Steps on each worker's own gradients, with averages of models between them (Ripples, 3.2).

    Args:
        every: steps from one average to the next. If the plan has several fragments, each is
            averaged once in that time.
        delay: steps during which an average is computed before it is applied; 0: the step that
            starts it waits for it.

    Raises:
        UsageError: a number is out of range.
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
        """An exchange that averages models."""
        return frozenset({MEANS})


def check_local(options: Any) -> None:
    """Raise a `UsageError` unless ``every`` and ``delay`` are valid together."""
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
