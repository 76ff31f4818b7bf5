"""The events that a schedule receives and the commands that it yields.

Buckets are numbered by position in the plan, first ready first.
"""

from __future__ import annotations

import enum
from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar, Protocol

from wingbeat.schedules.intents import Answer, Intent


class Operation(enum.Enum):
    """An operation on a bucket; `wingbeat.exchanges` implements it."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    ALL_GATHER_PARAMETERS = "all_gather_parameters"
    """All-gather updated parameters instead of gradients."""
    PUSH = "push"
    """Push to the servers, which keep the sum."""
    PULL = "pull"
    """Pull the sum that the servers keep."""
    FETCH = "fetch"
    """Request the parameters of the servers' next update."""
    EXPECT = "expect"
    """Receive the same without a request."""
    CONTRIBUTE = "contribute"
    """Send to the workers that sum; sums arrive asynchronously."""


class Phase(enum.Enum):
    """State of the gradients of the last backward."""

    IDLE = enum.auto()
    """Used, dropped, or not computed yet."""
    REDUCED = enum.auto()
    """Each worker has, or will have, the sum of its own blocks."""
    UNDER_WAY = enum.auto()
    """In flight: every worker will have all of them."""
    WHOLE = enum.auto()
    """Every worker has all of them."""
    LOST = enum.auto()
    """Added to gradients that a step had already used, and ignored."""


# -- events -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Planned:
    """The buckets change before the next backward.

    ``forward``: all buckets, first needed by forward first. ``members``: for each bucket, by
    number, the parameters that the optimizer updates.
    """

    forward: tuple[int, ...]
    members: tuple[frozenset[int], ...] = ()


@dataclass(frozen=True, slots=True)
class BackwardBegins:
    """The first gradient of a backward is ready; no bucket contains any of them yet."""


@dataclass(frozen=True, slots=True)
class BucketReady:
    """All gradients of a bucket are in its buffer. Buckets become ready in the plan's order."""

    bucket: int


@dataclass(frozen=True, slots=True)
class BackwardEnds:
    """Every bucket of a backward was ready.

    ``looked_at``: some gradients will certainly be read, for example by another optimizer that
    updates some parameters. ``lost``: they were added to gradients that a step had already used.
    """

    looked_at: bool = False
    lost: bool = False


@dataclass(frozen=True, slots=True)
class GradientsNeeded:
    """Whole gradients are about to be read."""


@dataclass(frozen=True, slots=True)
class PartsNeeded:
    """Each worker's own blocks are about to be changed: `Intent.CLIP` or `Intent.SCALE`."""

    intent: Intent = Intent.CLIP


@dataclass(frozen=True, slots=True)
class GradientsDropped:
    """The gradients of the last backward were dropped."""


@dataclass(frozen=True, slots=True)
class StepCalled:
    """The optimizer's step was called.

    ``in_parts``: the step can be made later and bucket by bucket. ``used``: parameters for which
    this worker has a gradient.
    """

    in_parts: bool = True
    used: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class OthersStep:
    """This worker has run out of batches; the others are about to use the last gradients."""


@dataclass(frozen=True, slots=True)
class ParametersNeeded:
    """The parameters of these buckets are about to be read."""

    buckets: tuple[int, ...]


Event = (
    Planned | BackwardBegins | BucketReady | BackwardEnds | GradientsNeeded | PartsNeeded
    | GradientsDropped | StepCalled | OthersStep | ParametersNeeded
)  # fmt: skip


# -- commands -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """Start a collective on a bucket's buffer, after all that were started before.

    ``chained``: a chunk may start as soon as the bucket's previous collective has finished with it;
    otherwise that collective is complete.
    """

    operation: Operation
    bucket: int
    chained: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for the collective that was started last on the bucket.

    ``whole``: the result is whole gradients, equal on all workers. ``read_only``: the buffer is not
    written until the bucket's next operation; parts of it may still be in transit.
    """

    bucket: int
    whole: bool = True
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class Show:
    """Set ``p.grad`` to the whole gradients that the buckets hold."""


@dataclass(frozen=True, slots=True)
class Defer:
    """Defer an update until the bucket's parameters are needed, with the settings of this step.

    ``used``: the parameters that are due; None for all.
    """

    bucket: int
    used: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class Update:
    """Make the deferred update of a bucket."""

    bucket: int


@dataclass(frozen=True, slots=True)
class Step:
    """Step the optimizer on all parameters at once, with whole gradients."""


@dataclass(frozen=True, slots=True)
class Announce:
    """Announce to all workers how this one will use its gradients.

    ``used``: parameters for which this worker has a gradient, where that matters.
    """

    intent: Intent
    used: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Await:
    """Wait for the announcements of all workers; the driver sends back an `Answer`."""


@dataclass(frozen=True, slots=True)
class Share:
    """Share settings and whole gradients of a step with workers without batches."""

    answer: Answer


@dataclass(frozen=True, slots=True)
class UpdateOwn:
    """Update this worker's blocks of a bucket.

    ``used``: parameters for which any worker has a gradient; others are unchanged.
    """

    bucket: int
    used: frozenset[int]


@dataclass(frozen=True, slots=True)
class Place:
    """Copy this worker's parameters of a bucket to the place of its gradients, to be gathered."""

    bucket: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Stop treating the content of the buffers as gradients.

    ``spent``: parameters whose gradients a step has used; None if they were dropped.
    """

    spent: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class Hand:
    """Send the servers the local parameters or gradients that their next update lacks."""

    answer: Answer


@dataclass(frozen=True, slots=True)
class UpdateServers:
    """Request an update from the servers.

    ``unasked``: servers send parameters to this worker as soon as they are updated.
    """

    answer: Answer
    unasked: bool


@dataclass(frozen=True, slots=True)
class Average:
    """Start averaging the fragments ``first`` up to, without, ``last`` with other workers."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Adopt:
    """Wait for the average that was started last and adopt it, unless that has been done."""


UpdateCommand = (
    Defer | Update | UpdateOwn | Place | Step | Share | Forget | Hand | UpdateServers | Average
    | Adopt
)  # fmt: skip
"""Commands of the optimizer's side of training."""

Command = Start | Wait | Show | Announce | Await | UpdateCommand

Commands = Generator[Command, Answer | None, None]
"""A sequence of commands; `Await` receives an answer."""


class Schedule(Protocol):
    """A state machine that orders communication and updates relative to forward and backward.

    It does not depend on torch, a clock or connections. The driver performs each command before it
    requests the next one: hooks do so in training, a simulator in virtual time. ``phase`` is the
    state of the gradients of the last backward; with ``whole_after_backward`` they are whole on
    every worker when backward returns.
    """

    phase: Phase
    whole_after_backward: ClassVar[bool]

    def react(self, event: Event) -> Commands:
        """Yield the commands that follow ``event``."""
        ...
