"""What every way of applying an optimizer has in common."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from wingbeat.collectives import Collectives
from wingbeat.engine.gradients.bucket import Bucket
from wingbeat.engine.gradients.bucketing import Bucketing
from wingbeat.engine.gradients.steps import Steps
from wingbeat.engine.updates.shards import Shards
from wingbeat.engine.updates.stepper import Stepper
from wingbeat.schedules.events import Event, Phase, UpdateCommand

Closure = Callable[[], Any] | None


class Host(Protocol):
    """What an update may ask of the engine that it is part of."""

    @property
    def phase(self) -> Phase:
        """Where the gradients of the last backward are."""

    def tell(self, event: Event, closure: Closure = None) -> Any:
        """Do what the schedule has to say; return what a whole step has returned, if any."""

    def recover(self) -> None:
        """Keep in step with the other workers if an exception cut a backward short."""

    def flush(self) -> None:
        """Make every update that is due."""

    def settle(self) -> None:
        """Make parameters current and gradients whole."""


@dataclass(frozen=True)
class Training:
    """What an update works on.

    Attributes:
        optimizer: the user's.
        stepper: runs its own step on some parameters or on all.
        steps: counts the steps.
        bucketing: the plan in force.
        collectives: of all the workers.
        refresh: brings parameters up to date that somebody is about to read.
    """

    optimizer: torch.optim.Optimizer
    stepper: Stepper
    steps: Steps
    bucketing: Bucketing
    collectives: Collectives
    refresh: Callable[[list[torch.Tensor]], None]


class Update(Protocol):
    """Who applies the optimizer, to what, and when.

    Attributes:
        defers: whether updates may be made only when somebody looks.
        agrees: whether the workers agree on what they do before each exchange after a backward.
        option: what asks for it, as users write it, where no worker has the whole optimizer; empty
            where each has.
    """

    defers: ClassVar[bool]
    agrees: ClassVar[bool]
    option: ClassVar[str]

    @property
    def shards(self) -> Shards | None:
        """This worker's part of the optimizer's state; None where each has the whole."""

    def step(self, host: Host, closure: Closure) -> Any:
        """Do what a call of the user's ``optimizer.step`` asks for."""

    def step_of_others(self, host: Host) -> None:
        """After a backward without batches of its own, do as the other workers do."""

    def perform(self, command: UpdateCommand, closure: Closure) -> Any:
        """Do as the schedule says; return what a whole step has returned."""

    def reads_only(self, bucket: Bucket) -> bool:
        """Whether the bucket's due update leaves the buffer as it is, which may be sent still."""

    def as_of_step(self) -> contextlib.AbstractContextManager[None]:
        """Let due updates be made inside as if at the moment of their step."""

    def planned(self) -> None:
        """Other buckets are in force."""

    def dropped(self, set_to_none: bool) -> None:
        """The user has zeroed the gradients, or a backward was cut short."""

    def lost(self) -> bool:
        """Whether a backward has added to gradients that a step has used up."""

    def why_lost(self, what: str) -> str:
        """Say why ``what``, which needs gradients that a step has used up, is not possible."""

    def refuse_lost(self, what: str) -> None:
        """Raise a `UsageError` if ``what`` needs gradients that a step has used up."""

    def level(self, *, always: bool) -> bool:
        """Wait until all workers hold the same parameters, where they differ for a while.

        Args:
            always: whether also if this worker has made no step since the last time.

        Returns:
            Whether all workers have met, each in this method; where they never differ nobody waits.
        """

    def loaded(self) -> None:
        """The optimizer has loaded a whole state."""

    def whole_state(self, host: Host) -> contextlib.AbstractContextManager[None]:
        """Let the optimizer hold its whole state inside."""

    def visible_state(self) -> Any:
        """Return the optimizer's state for somebody to read."""

    def before_forward(self) -> None:
        """A forward of the model's begins that may be trained on."""

    def leave(self) -> None:
        """Before `detach`, with all workers: end what a refusal may have left open."""

    def detach(self) -> None:
        """Leave the optimizer as a plain one."""


def evaluated(closure: Closure) -> Any:
    """Call the closure, if there is one, as optimizers do."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
