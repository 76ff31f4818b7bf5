"""The base class of updates in which each worker has a part of the optimizer.

A step consumes the gradients: the buffers contain parameters afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NoReturn

import torch

from wingbeat.engine.gradients.bucket import Bucket, Slot
from wingbeat.engine.gradients.views import ShownGradients, replaced
from wingbeat.engine.updates.deferred import PendingUpdates, overlapping
from wingbeat.engine.updates.json_values import decode, encode
from wingbeat.engine.updates.stepper import GroupSnapshot, State, step_outside
from wingbeat.engine.updates.update import Closure, Host, Training, Update, evaluated
from wingbeat.errors import MismatchError, PeerError, UsageError
from wingbeat.schedules.events import GradientsNeeded, OthersStep, Phase, Schedule, StepCalled
from wingbeat.schedules.intents import Answer

SCALER = ("grad_scale", "found_inf")
"""Attributes that a GradScaler sets on an optimizer that unscales in its own step."""


class DividedState(Mapping[Any, Any]):
    """Replaces optimizer state that is stored elsewhere: not empty, not readable."""

    def __init__(self, count: int, why: str) -> None:
        self._count, self._why = count, why

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, _key: Any) -> NoReturn:
        raise UsageError(f"optimizer.state with {self._why}")

    def __iter__(self) -> Iterator[Any]:
        return self[None]

    def __setitem__(self, key: Any, _value: Any) -> None:
        self[key]

    def __delitem__(self, key: Any) -> None:
        self[key]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]


class DividedUpdate(Update):
    """Steps on gradients that no worker needs whole, and copies parameters that peers have updated.

    Attributes:
        option: the user's option that divides the optimizer.
        state_is: where the optimizer's state is stored, and how to get it.
    """

    defers: ClassVar[bool] = True
    agrees: ClassVar[bool] = True
    state_is: ClassVar[str]

    def __init__(self, training: Training, schedule: Schedule, views: ShownGradients) -> None:
        super().__init__(training)
        self._schedule = schedule
        self._views = views
        self._pending = PendingUpdates(training.refresh)
        self._snapshot: GroupSnapshot = []
        self._spent: list[Slot] = []
        self._fresh: dict[int, list[Slot]] = {}
        self._has_whole_state = False

    # -- the step -------------------------------------------------------------------------

    def step(self, host: Host, closure: Closure) -> Any:
        """Evaluate the closure, consume the gradients, and queue the exchange in forward order."""
        training, slots = self._training, self._training.bucketing.slots
        training.stepper.arguments.refuse_others(f"with {self.option}", "wingbeat.DeAR()")
        loss = evaluated(closure)
        host.recover()
        self.refuse_lost("optimizer.step()")
        if self._reduced and replaced(slots, training.stepper.owns):
            host.dispatch(GradientsNeeded())
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
            host.flush()  # hooks read the new parameters
        training.stepper.run_hooks("post")
        return loss

    def shadow_step(self, host: Host) -> None:
        """Step like the workers that still have batches, after a backward without any."""
        try:
            self._step(host, OthersStep())
        finally:
            for key in SCALER:
                self._training.optimizer.__dict__.pop(key, None)

    def _step(self, host: Host, event: StepCalled | OthersStep) -> None:
        self._pending.begin(self._snapshot, self._training.bucketing.device)
        with torch.no_grad():
            host.dispatch(event)

    @property
    def _reduced(self) -> bool:
        return self._schedule.phase is Phase.REDUCED

    def _defer(self, bucket: Bucket, used: frozenset[int]) -> None:
        self._fresh[bucket.index] = [slot for slot in bucket.slots if slot.index in used]
        self._pending.add(bucket, (slot.param for slot in self._fresh[bucket.index]))

    def _forget(self, spent: frozenset[int] | None) -> None:
        """Invalidate the gradients in the buffers; ``spent``: those that a step has consumed."""
        if spent is not None:
            for slot in self._training.bucketing.slots:
                if slot.index in spent or slot.param.grad is slot.pending:
                    slot.param.grad = None
                if slot.index in spent:
                    self._spent.append(slot)
        self._views.drop()

    def step_modes(self) -> contextlib.AbstractContextManager[None]:
        """Restore the modes of the step that parameters belong to."""
        return self._pending.step_modes()

    # -- gradients that a step has used up -------------------------------------------------

    def on_zero_grad(self, set_to_none: bool) -> None:
        """Clear the record of consumed gradients, or zero these."""
        if not set_to_none:
            for slot in self._spent:
                if slot.param.grad is None:
                    slot.param.grad = torch.zeros_like(slot.param)
        self._spent = []

    def gradients_lost(self) -> bool:
        """Whether a backward has added to gradients that a step has consumed."""
        return bool(self._spent)

    def lost_message(self, what: str) -> str:
        """Return the error text for ``what``, which needs gradients that a step has consumed."""
        return (
            f"{what}: with {self.option} a step uses the gradients up, and nothing can be "
            "added to them; call zero_grad() of the optimizer that distribute() has returned "
            "between step() and backward(), and backward() before each step()"
        )

    def refuse_lost(self, what: str) -> None:
        """Raise a `UsageError` if ``what`` needs gradients that a step has consumed."""
        if self._spent:
            raise UsageError(self.lost_message(what))

    # -- state ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def whole_state(self, host: Host) -> Iterator[None]:
        """Give the optimizer the whole state within the context."""
        host.settle()
        inside = self._training.optimizer.__dict__
        kept, inside["state"] = inside["state"], self._whole()
        self._has_whole_state = True
        try:
            yield
        finally:
            inside["state"] = kept
            self._has_whole_state = False

    def visible_state(self) -> Any:
        """Return the whole optimizer state, else a mapping that refuses reads."""
        state = super().visible_state()
        if self._training.stepper.stepping or self._has_whole_state or not self._parts():
            return state
        return DividedState(self._parts(), self.state_is)

    def detach(self) -> None:
        """Restore the optimizer's whole state."""
        self._training.optimizer.__dict__["state"] = self._whole()

    def _whole(self) -> State:
        """Return the whole state in new tensors, as the undivided optimizer would have it."""
        raise NotImplementedError

    def _parts(self) -> int:
        """Return the number of parts of the state that this worker has a record of."""
        raise NotImplementedError


def check_divisible(training: Training) -> None:
    """Check that the optimizer can be divided; raise a `MismatchError` if workers' differ."""
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


def refuse_overlapping(params: Mapping[str, torch.Tensor]) -> None:
    """Raise a `UsageError` if parameters, by name, share memory."""
    found = overlapping(list(params.values()))
    if found:
        first, second = (list(params)[i] for i in found)
        raise UsageError(
            f"parameters {first!r} and {second!r} share memory, so their updates cannot be "
            'divided: tie them by one Parameter, or leave shard_optimizer or update="server" out'
        )


# -- a worker without batches -------------------------------------------------------------
#
# Without shards its steps have no effect, because it copies parameters at the end. With shards it
# alone updates its blocks. Its schedulers stand still, so it needs the others' settings, and their
# gradients where these may have been changed.


def share_settings(training: Training, answer: Answer) -> Any:
    """Send the leader's settings of this step to all workers; return them."""
    world = training.collectives.world
    mine = _settings(training) if world.rank == answer.leader else None
    return world.exchange("optimizer settings", mine)[answer.leader]


def adopt_settings(training: Training, answer: Answer, shared: Any) -> GroupSnapshot:
    """Return shared settings, and set a GradScaler's; raise a `PeerError` for invalid ones."""
    world = training.collectives.world
    own = training.stepper.snapshot()
    device = training.bucketing.buckets[0].flat.device
    try:
        groups, attributes = shared
        snapshot = [{k: decode(v, device) for k, v in group.items()} for group in groups]
        found = {key: decode(attributes[key], device) for key in SCALER if key in attributes}
        training.optimizer.__dict__.update(found)
        if [list(group) for group in snapshot] != [list(group) for group in own]:
            raise ValueError
    except (AttributeError, TypeError, ValueError):
        raise PeerError(
            f"rank {world.rank}: rank {answer.leader} sent malformed optimizer settings: "
            f"{str(shared)[:80]}"
        ) from None
    return snapshot


def _settings(training: Training) -> list[Any]:
    inside = training.optimizer.__dict__
    try:
        return [
            [{k: encode(v) for k, v in group.items()} for group in training.stepper.snapshot()],
            {key: encode(inside[key]) for key in SCALER if key in inside},
        ]
    except TypeError as err:
        raise UsageError(
            f"join() with shard_optimizer: a setting in the optimizer's param groups: {err}"
        ) from None


@torch.no_grad()
def share_gradients(training: Training, answer: Answer) -> None:
    """Broadcast the leader's whole gradients, which it may have clipped or scaled."""
    rank = training.collectives.world.rank
    for bucket in training.bucketing.buckets:
        bucket.settle()
        if rank == answer.leader:
            for slot in bucket.slots:
                if slot.param.grad is not None and slot.param.grad is not slot.view:
                    slot.view.copy_(slot.param.grad)
        training.collectives.broadcast(bucket.flat, answer.leader, label="gradients").wait()
        if answer.follows(rank):
            for slot in bucket.slots:
                slot.param.grad = slot.view if slot.index in answer.used else None
