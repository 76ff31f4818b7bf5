"""What a schedule hears, and what it says: the whole of its language.

Buckets are numbers: their positions in the plan, first ready first.
"""

from __future__ import annotations

import enum
from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar, Protocol

from wingbeat.schedules.intents import Answer, Intent


class Operation(enum.Enum):
    """What can be started on a bucket; `wingbeat.exchanges` says what it means."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    ALL_GATHER_PARAMETERS = "all_gather_parameters"
    """Of what each worker has updated, in place of its gradients."""
    PUSH = "push"
    """To the servers, who keep the sum."""
    PULL = "pull"
    """Of the sum that the servers keep."""
    FETCH = "fetch"
    """Of the parameters that the servers update next; each is asked for."""
    EXPECT = "expect"
    """The same where they are sent without being asked for."""
    CONTRIBUTE = "contribute"
    """To those workers who sum; sums come when they come."""


class Phase(enum.Enum):
    """Where the gradients of the last backward are."""

    IDLE = enum.auto()
    """Nowhere: used up, dropped, or not made yet."""
    REDUCED = enum.auto()
    """Each worker has (or will have) the sum of its own blocks."""
    UNDER_WAY = enum.auto()
    """On their way: all of them will be on each worker."""
    WHOLE = enum.auto()
    """Everywhere: all of them on each worker."""
    LOST = enum.auto()
    """They were added to gradients that a step had used up, and count for nothing."""


# -- events -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Planned:
    """From the next backward on there are other buckets.

    Attributes:
        forward: all of them, that first which forward needs first.
        members: for each, by number, the parameters that the optimizer updates.
    """

    forward: tuple[int, ...]
    members: tuple[frozenset[int], ...] = ()


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
        lost: whether they were added to ones that a step had used up.
    """

    looked_at: bool = False
    lost: bool = False


@dataclass(frozen=True, slots=True)
class GradientsNeeded:
    """Somebody looks at whole gradients."""


@dataclass(frozen=True, slots=True)
class PartsNeeded:
    """Somebody changes each worker's own blocks.

    Attributes:
        intent: how: `Intent.CLIP` or `Intent.SCALE`.
    """

    intent: Intent = Intent.CLIP


@dataclass(frozen=True, slots=True)
class GradientsDropped:
    """The gradients of the last backward are not wanted any more."""


@dataclass(frozen=True, slots=True)
class StepCalled:
    """The optimizer is to step.

    Attributes:
        in_parts: whether it can do so on one bucket's parameters after the other, and later.
        used: parameters that this worker has a gradient for.
    """

    in_parts: bool = True
    used: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class OthersStep:
    """This worker has run out of batches; the others are about to use the last gradients."""


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
    | OthersStep
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
        whole: whether it brings whole gradients, the same on all workers.
        read_only: whether nobody writes to the buffer after that, before the bucket's next
            operation: parts of it may still be on their way to others.
    """

    bucket: int
    whole: bool = True
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class Show:
    """Let ``p.grad`` be the whole gradients that are in the buckets now."""


@dataclass(frozen=True, slots=True)
class Defer:
    """The bucket's update is due: make it when its parameters are needed, as if at this step.

    Attributes:
        used: the parameters that are due; None for all.
    """

    bucket: int
    used: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class Update:
    """Make the update of a bucket that was deferred."""

    bucket: int


@dataclass(frozen=True, slots=True)
class Step:
    """Let the optimizer step on all its parameters at once, on whole gradients."""


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell all workers what this one is about to do with its gradients.

    Attributes:
        intent: that.
        used: parameters that it has a gradient for, where that matters.
    """

    intent: Intent
    used: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Await:
    """Answer with what all workers have said."""


@dataclass(frozen=True, slots=True)
class Share:
    """Let workers without batches have what the others step with: settings, whole gradients."""

    answer: Answer


@dataclass(frozen=True, slots=True)
class UpdateOwn:
    """Update this worker's blocks of a bucket.

    Attributes:
        used: parameters that some worker has a gradient for; others are left alone.
    """

    bucket: int
    used: frozenset[int]


@dataclass(frozen=True, slots=True)
class Place:
    """Put this worker's parameters of a bucket where its gradients were, to be gathered."""

    bucket: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Let nobody take what is in the buffers for gradients any more.

    Attributes:
        spent: parameters whose gradients a step has used up; None where they were dropped instead.
    """

    spent: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class Hand:
    """Give the servers what they lack for their next update: parameters, or gradients, of here.

    Attributes:
        answer: what all workers do.
    """

    answer: Answer


@dataclass(frozen=True, slots=True)
class UpdateServers:
    """Have the servers update.

    Attributes:
        answer: what all workers do.
        unasked: whether parameters are to be sent to this worker as soon as they are made.
    """

    answer: Answer
    unasked: bool


@dataclass(frozen=True, slots=True)
class Average:
    """Begin to average parameters with other workers': those of fragments ``first`` to ``last``.

    Attributes:
        first: number of the first fragment.
        last: of the one behind the last.
    """

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Adopt:
    """Wait for the average that was begun last, and take it over; unless that has been done."""


UpdateCommand = (
    Defer
    | Update
    | UpdateOwn
    | Place
    | Step
    | Share
    | Forget
    | Hand
    | UpdateServers
    | Average
    | Adopt
)
"""What the optimizer's side of training does."""

Command = Start | Wait | Show | Announce | Await | UpdateCommand

Commands = Generator[Command, Answer | None, None]
"""Commands, one after the other; `Await` is answered."""


class Schedule(Protocol):
    """When what happens, relative to forward and backward: a state machine.

    It knows no torch, no clock and no link. Whoever drives it performs the commands in their
    order, each before the next is asked for: training by its hooks, a simulator in virtual time.

    Attributes:
        phase: where the gradients of the last backward are.
        whole_after_backward: whether they are whole on every worker when backward returns.
    """

    phase: Phase
    whole_after_backward: ClassVar[bool]

    def react(self, event: Event) -> Commands:
        """Yield what is to be done now that ``event`` has happened."""
        ...
