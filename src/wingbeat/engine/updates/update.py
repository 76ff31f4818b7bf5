"""The base class of updates, which run the optimizer; and updates of all parameters at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from wingbeat.collectives import Collectives
from wingbeat.engine.gradients.bucket import Bucket, StepCounter
from wingbeat.engine.gradients.bucketing import Bucketing
from wingbeat.engine.gradients.compression import Compression
from wingbeat.engine.updates.stepper import Stepper
from wingbeat.schedules.events import Event, Phase, Step, StepCalled, UpdateCommand

if TYPE_CHECKING:
    from wingbeat.engine.updates.shards import Shards

Closure = Callable[[], Any] | None


class Host(Protocol):
    """The part of the engine that updates call."""

    @property
    def phase(self) -> Phase:
        """The state of the last backward's gradients."""

    def dispatch(self, event: Event, closure: Closure = None) -> Any:
        """Perform the schedule's commands for ``event``; return the result of a whole step."""

    def recover(self) -> None:
        """Complete the collectives of a backward that an exception interrupted."""

    def flush(self) -> None:
        """Apply all deferred updates."""

    def settle(self) -> None:
        """Make parameters current and gradients whole."""


@dataclass(frozen=True)
class Training:
    """The objects that an update uses; ``refresh`` applies deferred updates of parameters."""

    optimizer: torch.optim.Optimizer
    stepper: Stepper
    steps: StepCounter
    bucketing: Bucketing
    collectives: Collectives
    refresh: Callable[[list[torch.Tensor]], None]


class Update:
    """Runs the optimizer; the base class updates at once, on whole gradients, on every worker.

    Attributes:
        defers: whether updates may be made only when parameters are read.
        agrees: whether the workers agree on their next action before each exchange after a
            backward.
        option: the user's option that divides the optimizer among workers or servers; empty if each
            worker has the whole optimizer.
        shards: this worker's part of the optimizer's state; None if each has the whole.
    """

    defers: ClassVar[bool] = False
    agrees: ClassVar[bool] = False
    option: ClassVar[str] = ""
    shards: Shards | None = None

    @property
    def differs(self) -> bool:
        """Whether this worker's model may differ from the others'."""
        return False

    @property
    def is_own(self) -> bool:
        """Whether a state dict contains state of this worker only."""
        return False

    def log_lost(self, saver: int, size: int, differed: bool) -> None:
        """Log once, on one rank, what a state lacks that rank ``saver`` of ``size`` has saved."""

    def __init__(self, training: Training) -> None:
        self._training = training

    def step(self, host: Host, closure: Closure) -> Any:
        """Perform a call of the user's ``optimizer.step``."""
        raise NotImplementedError

    def shadow_step(self, host: Host) -> None:
        """Step like the other workers, after a backward without batches of its own."""
        raise NotImplementedError

    def perform(self, command: UpdateCommand, closure: Closure) -> Any:
        """Perform a command of the schedule; return the result of a whole step."""
        raise NotImplementedError

    def preserves_gradients(self, bucket: Bucket) -> bool:  # noqa: ARG002
        """Whether the deferred update does not write to the bucket, which may still be sent."""
        return False

    def step_modes(self) -> contextlib.AbstractContextManager[None]:
        """Restore the modes of the step that deferred updates belong to."""
        return contextlib.nullcontext()

    def on_new_buckets(self) -> None:
        """Handle a change of the plan."""

    def on_zero_grad(self, set_to_none: bool) -> None:
        """Handle zeroed gradients, or an interrupted backward."""

    def gradients_lost(self) -> bool:
        """Whether a backward has added to gradients that a step has consumed."""
        return False

    def lost_message(self, what: str) -> str:
        """Return the error text for ``what``, which needs gradients that a step has consumed."""
        return what

    def refuse_lost(self, what: str) -> None:
        """Raise a `UsageError` if ``what`` needs gradients that a step has consumed."""

    def level(self, *, always: bool) -> bool:  # noqa: ARG002
        """Wait until all workers hold the same parameters; return whether they synchronised here.

        ``always``: even if this worker has made no step since the last call.
        """
        return False

    def on_load_state_dict(self) -> None:
        """Handle a whole state that the optimizer has loaded."""

    def whole_state(self, host: Host) -> contextlib.AbstractContextManager[None]:  # noqa: ARG002
        """Give the optimizer its whole state within the context."""
        return contextlib.nullcontext()

    def visible_state(self) -> Any:
        """Return the optimizer's state for the user to read."""
        return self._training.optimizer.__dict__["state"]

    def before_forward(self) -> None:
        """Handle the start of a forward that may be trained on."""

    def before_detach(self) -> None:
        """Complete operations that an error interrupted, before `detach`, on all workers."""

    def detach(self) -> None:
        """Make the optimizer a plain one."""


class WholeUpdate(Update):
    """Runs the optimizer's own step at once, on whole gradients."""

    def step(self, host: Host, closure: Closure) -> Any:
        """Run the optimizer's own step."""
        host.recover()
        return host.dispatch(StepCalled(in_parts=False), closure)

    def shadow_step(self, host: Host) -> None:
        """Run the optimizer's own step: all workers have the same gradients."""
        self.step(host, None)

    def perform(self, command: UpdateCommand, closure: Closure) -> Any:
        """Perform `Step`, the only command of these schedules."""
        assert isinstance(command, Step), command
        self._training.steps.count += 1
        return self._training.stepper.whole_step(closure)


class SingleWorkerUpdate(WholeUpdate):
    """Steps with the momentum and residuals that codecs have kept in a run of many workers."""

    def __init__(self, training: Training, compression: Compression) -> None:
        super().__init__(training)
        self._compression = compression

    def step(self, host: Host, closure: Closure) -> Any:
        """Run the optimizer's own step."""
        if closure is None:
            self._complete_gradients()
            return super().step(host, None)

        def completed() -> Any:
            loss = closure()
            self._complete_gradients()
            return loss

        return super().step(host, completed)

    def _complete_gradients(self) -> None:
        if self._compression.changes_alone():
            for slot in self._training.bucketing.slots:
                self._compression.alone(slot)


def evaluated(closure: Closure) -> Any:
    """Call the closure, if any, with gradients enabled."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
