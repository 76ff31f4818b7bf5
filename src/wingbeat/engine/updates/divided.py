"""What updates in which a worker has only a part of the optimizer have in common.

A step uses the gradients up: the buffers hold parameters afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from wingbeat.engine.gradients.bucket import Bucket, Slot
from wingbeat.engine.gradients.convert import refuse_overlapping
from wingbeat.engine.gradients.views import Views, replaced
from wingbeat.engine.updates.due import Due
from wingbeat.engine.updates.shards import DividedState
from wingbeat.engine.updates.sharing import SCALER
from wingbeat.engine.updates.stepper import GroupSnapshot, State, step_outside
from wingbeat.engine.updates.update import Closure, Host, Training, evaluated
from wingbeat.errors import MismatchError, UsageError
from wingbeat.schedules.events import GradientsNeeded, OthersStep, Phase, Schedule, StepCalled


class DividedUpdate:
    """Steps with gradients that no worker needs whole, and takes over what others have updated.

    Attributes:
        option: what asks for it, as users write it.
        state_is: where the optimizer's state lies, and how to have it.
    """

    defers: ClassVar[bool] = True
    agrees: ClassVar[bool] = True
    option: ClassVar[str]
    state_is: ClassVar[str]

    def __init__(self, training: Training, schedule: Schedule, views: Views) -> None:
        self._training = training
        self._schedule = schedule
        self._views = views
        self._due = Due(training.refresh)
        self._snapshot: GroupSnapshot = []
        self._spent: list[Slot] = []
        self._fresh: dict[int, list[Slot]] = {}
        self._has_whole_state = False

    # -- the step -------------------------------------------------------------------------

    def step(self, host: Host, closure: Closure) -> Any:
        """Have gradients used up, queue what brings parameters, first needed first, and return.

        A ``closure`` is called once, before the step.

        Raises:
            UsageError: a step has used the gradients up, or is given arguments of its own.
        """
        training, slots = self._training, self._training.bucketing.slots
        training.stepper.given.refuse_others(f"with {self.option}", "wingbeat.DeAR()")
        loss = evaluated(closure)
        host.recover()
        self.refuse_lost("optimizer.step()")
        if self._reduced and replaced(slots, training.stepper.owns):
            host.tell(GradientsNeeded())
        training.stepper.refuse_regrouped()
        training.stepper.run_hooks("pre")
        if not self._reduced:
            host.flush()
        self._snapshot = training.stepper.snapshot()
        training.steps.count += 1
        owned = (slot for slot in slots if training.stepper.owns(slot.param))
        used = (s for s in owned if (s.used if self._reduced else s.param.grad is not None))
        self._step(host, StepCalled(used=frozenset(slot.index for slot in used)))
        step_outside(training.bucketing.slot_of, training.stepper, self._snapshot)
        if training.stepper.hooked:
            host.flush()  # hooks are to see the new parameters
        training.stepper.run_hooks("post")
        return loss

    def step_of_others(self, host: Host) -> None:
        """Do as the workers that still have batches, after a backward without any."""
        try:
            self._step(host, OthersStep())
        finally:
            for key in SCALER:
                self._training.optimizer.__dict__.pop(key, None)

    def _step(self, host: Host, event: StepCalled | OthersStep) -> None:
        self._due.begin(self._snapshot, self._training.bucketing.device)
        with torch.no_grad():
            host.tell(event)

    @property
    def _reduced(self) -> bool:
        return self._schedule.phase is Phase.REDUCED

    def _defer(self, bucket: Bucket, used: frozenset[int]) -> None:
        self._fresh[bucket.index] = [slot for slot in bucket.slots if slot.index in used]
        self._due.add(bucket, (slot.param for slot in self._fresh[bucket.index]))

    def _forget(self, spent: frozenset[int] | None) -> None:
        """Have nobody take for gradients what is none any more."""
        if spent is not None:
            for slot in self._training.bucketing.slots:
                if slot.index in spent or slot.param.grad is slot.pending:
                    slot.param.grad = None
                if slot.index in spent:
                    self._spent.append(slot)
        self._views.drop()

    def reads_only(self, bucket: Bucket) -> bool:  # noqa: ARG002
        """Parameters are waited for as such."""
        return False

    def as_of_step(self) -> contextlib.AbstractContextManager[None]:
        """Let parameters be taken over inside as if at the moment of their step."""
        return self._due.as_of_step()

    # -- gradients that a step has used up -------------------------------------------------

    def dropped(self, set_to_none: bool) -> None:
        """Begin anew; zeros stand for what was used up, if they are asked for."""
        if not set_to_none:
            for slot in self._spent:
                if slot.param.grad is None:
                    slot.param.grad = torch.zeros_like(slot.param)
        self._spent = []

    def lost(self) -> bool:
        """Whether a backward has added to gradients that a step has used up."""
        return bool(self._spent)

    def why_lost(self, what: str) -> str:
        """Say why ``what``, which needs gradients that a step has used up, is not possible."""
        return (
            f"{what}: with {self.option} a step uses the gradients up, and nothing can be "
            "added to them; call zero_grad() of the optimizer that distribute() has returned "
            "between step() and backward(), and backward() before each step()"
        )

    def refuse_lost(self, what: str) -> None:
        """Raise a `UsageError` if ``what`` needs gradients that a step has used up."""
        if self._spent:
            raise UsageError(self.why_lost(what))

    # -- state ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def whole_state(self, host: Host) -> Iterator[None]:
        """Let the optimizer hold the whole state inside."""
        host.settle()
        inside = self._training.optimizer.__dict__
        kept, inside["state"] = inside["state"], self._whole()
        self._has_whole_state = True
        try:
            yield
        finally:
            inside["state"] = kept
            self._has_whole_state = False

    def level(self, *, always: bool) -> bool:  # noqa: ARG002
        """All workers have the same parameters."""
        return False

    def visible_state(self) -> Any:
        """Return the optimizer's state where it is whole, and else what refuses to be read."""
        state = self._training.optimizer.__dict__["state"]
        if self._training.stepper.stepping or self._has_whole_state or not self._parts():
            return state
        return DividedState(self._parts(), self.state_is)

    def before_forward(self) -> None:
        """Nothing to look at."""

    def leave(self) -> None:
        """Nothing is left open."""

    def detach(self) -> None:
        """Give the optimizer its whole state back."""
        self._training.optimizer.__dict__["state"] = self._whole()

    def _whole(self) -> State:
        """Return the whole state in new tensors, as the undivided optimizer would have it."""
        raise NotImplementedError

    def _parts(self) -> int:
        """Return how many parts of the state there are, as far as this worker knows."""
        raise NotImplementedError


def check_divisible(training: Training) -> None:
    """Make sure that parameters and their groups allow a divided optimizer.

    Raises:
        UsageError: parameters share memory.
        MismatchError: the workers' optimizers differ.
    """
    refuse_overlapping({slot.name: slot.param for slot in training.bucketing.slots})
    names = {slot.param: slot.name for slot in training.bucketing.slots}
    groups = [
        [names[p] for p in group["params"] if p in names]
        for group in training.optimizer.param_groups
    ]
    mine = [type(training.optimizer).__name__, groups]
    world = training.collectives.world
    for rank, answer in enumerate(world.exchange("optimizer", mine)):
        if answer != mine:
            raise MismatchError(
                f"rank {rank} has another optimizer than rank {world.rank}, or other "
                'param groups; with a divided optimizer (shard_optimizer, update="server") all '
                "ranks must build the same"
            )
