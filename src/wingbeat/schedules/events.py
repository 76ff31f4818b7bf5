"""What a schedule hears, and what it says: the whole of its language.

Buckets are numbers: their positions in the plan, first ready first.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


class Operation(enum.Enum):
    """What can be started on a bucket. Each value is the name of a method of `Collectives`."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"


# -- events -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Planned:
    """From the next backward on there are other buckets.

    Attributes:
        forward: all of them, that first which forward needs first.
    """

    forward: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BackwardBegins:
    """The first gradient of a backward is there, and nothing of it is in a bucket yet."""


@dataclass(frozen=True, slots=True)
class BucketReady:
    """All of a bucket's gradients are in its buffer. Buckets become ready in the plan's order."""

    bucket: int


@dataclass(frozen=True, slots=True)
class BackwardEnds:
    """Every bucket of a backward was ready.

    Attributes:
        looked_at: whether somebody is going to look at some of the gradients for certain, as
            another optimizer does that updates some parameters.
    """

    looked_at: bool = False


@dataclass(frozen=True, slots=True)
class GradientsNeeded:
    """Somebody looks at whole gradients."""


@dataclass(frozen=True, slots=True)
class PartsNeeded:
    """Somebody changes each worker's own blocks, as clipping and unscaling do."""


@dataclass(frozen=True, slots=True)
class GradientsDropped:
    """The gradients of the last backward are not wanted any more."""


@dataclass(frozen=True, slots=True)
class StepCalled:
    """The optimizer is to step.

    Attributes:
        in_parts: whether it can do so on one bucket's parameters after the other, and later.
    """

    in_parts: bool = True


@dataclass(frozen=True, slots=True)
class ParametersNeeded:
    """Somebody is about to read the parameters of these buckets."""

    buckets: tuple[int, ...]


Event = (
    Planned
    | BackwardBegins
    | BucketReady
    | BackwardEnds
    | GradientsNeeded
    | PartsNeeded
    | GradientsDropped
    | StepCalled
    | ParametersNeeded
)


# -- commands -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """Begin a collective on a bucket's buffer, behind all that were started before.

    Attributes:
        chained: whether a chunk may go on as soon as the bucket's collective before is done with
            it; otherwise that one is over.
    """

    operation: Operation
    bucket: int
    chained: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """Go on when the collective that was started last on the bucket is done.

    Attributes:
        whole: whether the buffer is the same on all workers then.
    """

    bucket: int
    whole: bool = True


@dataclass(frozen=True, slots=True)
class Show:
    """Let ``p.grad`` be the whole gradients that are in the buckets now."""


@dataclass(frozen=True, slots=True)
class Defer:
    """The bucket's update is due: make it when its parameters are needed, as if at this step."""

    bucket: int


@dataclass(frozen=True, slots=True)
class Update:
    """Make the update of a bucket that was deferred."""

    bucket: int


@dataclass(frozen=True, slots=True)
class Step:
    """Let the optimizer step on all its parameters at once, on whole gradients."""


Command = Start | Wait | Show | Defer | Update | Step


class Schedule(Protocol):
    """When what happens, relative to forward and backward: a state machine.

    It knows no torch, no clock and no link. Whoever drives it performs the commands in their
    order, each before the next is asked for: training by its hooks, a simulator in virtual time.
    """

    def react(self, event: Event) -> Iterable[Command]:
        """Yield what is to be done now that ``event`` has happened."""
        ...
