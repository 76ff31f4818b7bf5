"""Updates in which each worker, or each server, has a part of the optimizer.

A step consumes the gradients: the buffers contain parameters afterwards. The schedule decides the
order of operations.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NoReturn

import torch

from wingbeat.engine.gradients.bucket import Bucket, Slot
from wingbeat.engine.gradients.placed import local
from wingbeat.engine.gradients.views import ShownGradients, replaced
from wingbeat.engine.updates.json_values import decode, encode
from wingbeat.engine.updates.shards import Piece, Shards, TensorShards, copy_parameter
from wingbeat.engine.updates.stepper import GroupSnapshot, Modes, State, step_outside
from wingbeat.engine.updates.trials import prove_elementwise, prove_tensorwise
from wingbeat.engine.updates.update import (
    Closure,
    DeferredParameters,
    Host,
    Training,
    Update,
    evaluated,
    overlapping,
    refuse_evaluating,
)
from wingbeat.errors import MismatchError, PeerError, UsageError
from wingbeat.observe.events import stream
from wingbeat.schedules import events
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
        self._pending = DeferredParameters(training.refresh)
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
        with host.lock:
            host.recover()
            self.refuse_lost("optimizer.step()")
            if self._reduced and replaced(slots):
                host.dispatch(GradientsNeeded())
            training.stepper.refuse_regrouped()
            training.stepper.run_hooks("pre")
            if not self._reduced:
                host.flush()
            self._snapshot = training.stepper.snapshot()
            training.steps.count += 1
            owned = (slot for slot in slots if slot.owned)
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
        self.modes = Modes(self._training.bucketing.device)
        with torch.no_grad():
            host.dispatch(event)

    @property
    def _reduced(self) -> bool:
        return self._schedule.phase is Phase.REDUCED

    def _defer(self, bucket: Bucket, used: frozenset[int]) -> None:
        self._fresh[bucket.index] = [slot for slot in bucket.slots if slot.index in used]
        self._pending.add(bucket, [slot.param for slot in self._fresh[bucket.index]])

    def _forget(self, spent: frozenset[int] | None) -> None:
        """Invalidate the gradients in the buffers; ``spent``: those that a step has consumed."""
        if spent is not None:
            for slot in self._training.bucketing.slots:
                if slot.index in spent or slot.param.grad is slot.pending:
                    slot.param.grad = None
                if slot.index in spent:
                    self._spent.append(slot)
        self._views.drop()

    # -- gradients that a step has used up -------------------------------------------------

    def on_zero_grad(self, set_to_none: bool) -> None:
        """Clear the record of consumed gradients, or zero these."""
        if not set_to_none:
            for slot in self._spent:
                if slot.param.grad is None:
                    slot.param.grad = torch.zeros_like(slot.param)
        self._spent = []

    def lost_message(self, what: str) -> str:
        """Return the error text for ``what`` if a step has consumed the gradients, else nothing."""
        if not self._spent:
            return ""
        return (
            f"{what}: with {self.option} a step uses the gradients up, and nothing can be "
            "added to them; call zero_grad() of the optimizer that distribute() has returned "
            "between step() and backward(), and backward() before each step()"
        )

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
    """Raise a `UsageError` for parameters that share memory.

    A `MismatchError` if the workers' optimizers differ.
    """
    slots, optimizer = training.bucketing.slots, training.optimizer
    found = overlapping([local(slot.param) for slot in slots])
    if found:
        first, second = (slots[i].name for i in found)
        raise UsageError(
            f"parameters {first!r} and {second!r} share memory, so their updates cannot be "
            'divided: tie them by one Parameter, or leave shard_optimizer or update="server" out'
        )
    names = {slot.param: slot.name for slot in slots}
    groups = [[names[p] for p in group["params"] if p in names] for group in optimizer.param_groups]
    mine = [type(optimizer).__name__, groups]
    world = training.collectives.world
    for rank, answer in enumerate(world.exchange("optimizer", mine)):
        if answer != mine:
            raise MismatchError(
                f"{world.name(rank)} has another optimizer than {world.me}, or other "
                'param groups; with a divided optimizer (shard_optimizer, update="server") all '
                "ranks must build the same"
            )


class ShardedUpdate(DividedUpdate):
    """Updates this worker's blocks in ``step()``; the others' are copied as they are needed.

    Raises:
        UsageError: the optimizer cannot be divided, or parameters share memory.
        MismatchError: the workers' optimizers differ.
    """

    option: ClassVar[str] = "shard_optimizer"
    state_is: ClassVar[str] = (
        "shard_optimizer: each worker has a part of it; call optimizer.state_dict() on every rank "
        "for all of it, or optimizer.shard_state_dict()"
    )
    shards: Shards

    def __init__(self, training: Training, schedule: Schedule, views: ShownGradients) -> None:
        optimizer, slots = training.optimizer, training.bucketing.slots
        refuse_evaluating(optimizer)
        kind: type[Shards] = Shards
        try:
            each = prove_elementwise(optimizer, type(optimizer).step)
        except UsageError:
            prove_tensorwise(optimizer)
            kind, each = TensorShards, {}
        super().__init__(training, schedule, views)
        check_divisible(training)
        self.shards = kind(optimizer, training.stepper, training.collectives, slots, each)

    # -- commands of the schedule ----------------------------------------------------------

    def perform(self, command: events.UpdateCommand, closure: Closure) -> Any:  # noqa: ARG002
        """Perform one part of a step, or copy parameters that peers have updated."""
        buckets = self._training.bucketing.buckets
        match command:
            case events.UpdateOwn(number, used):
                with stream.timed("update", bucket=number):
                    self._update_own(buckets[number], used)
            case events.Share(answer):
                self._share(answer)
            case events.Place(number):
                self._place(buckets[number])
            case events.Defer(number, used):
                self._defer(buckets[number], used or frozenset())
            case events.Forget(spent):
                self._forget(spent)
                self.shards.steps += spent is not None
            case events.Update(number):
                with stream.timed("update", bucket=number):
                    self._copy_parameters(buckets[number])

    def _update_own(self, bucket: Bucket, used: frozenset[int]) -> None:
        """Run the optimizer on this worker's pieces of ``bucket`` that have a gradient."""
        pairs = []
        for piece in self.shards.pieces_in(bucket):
            piece.refresh()
            grad = self._gradient(bucket, piece)
            if grad is not None and piece.slot.index in used:
                piece.stand_in.grad = grad
                pairs.append((piece.slot.param, piece.stand_in))
        try:
            if pairs:
                self._training.stepper.step_on(pairs, self._snapshot, self.shards.state)
        finally:
            for _, stand_in in pairs:
                stand_in.grad = None

    def _gradient(self, bucket: Bucket, piece: Piece) -> torch.Tensor | None:
        shape = piece.stand_in.shape
        if self._reduced:
            return bucket.flat[piece.place.start : piece.place.stop].view(shape)
        grad = piece.slot.param.grad
        if grad is None:
            return None
        return grad.reshape(-1)[piece.span.start : piece.span.stop].view(shape)

    def _place(self, bucket: Bucket) -> None:
        """Write this worker's parameters over its gradients, unrounded: in their own dtype."""
        bucket.settle()
        # Another optimizer may have yet to step on gradients there, or the user may keep some.
        if any(slot.holds(slot.param.grad) for slot in bucket.slots) or bucket.is_referenced():
            bucket.reallocate()
            self._views.on_new_buffer(bucket)
        for piece in self.shards.pieces_in(bucket):
            bucket.flat[piece.place.start : piece.place.stop].copy_(piece.stand_in.reshape(-1))

    def _copy_parameters(self, bucket: Bucket) -> None:
        own = {piece.slot.index: piece for piece in self.shards.pieces_in(bucket)}
        with self._pending.updating([bucket]):
            for slot in self._fresh.pop(bucket.index):
                copy_parameter(slot, own.get(slot.index))

    # -- a worker without batches ----------------------------------------------------------

    def _share(self, answer: Answer) -> None:
        """Give a worker without batches what its step needs: it alone updates its blocks.

        Its schedulers stand still, so it needs the others' settings, and their gradients where
        these may have been changed.
        """
        world = self._training.collectives.world
        mine = self._encode_settings() if world.rank == answer.leader else None
        shared = world.exchange("optimizer settings", mine)[answer.leader]
        if self._schedule.phase is Phase.WHOLE:
            self._share_gradients(answer)
        if answer.follows(world.rank):
            self._snapshot = self._adopt_settings(answer.leader, shared)

    def _encode_settings(self) -> list[Any]:
        inside, snapshot = self._training.optimizer.__dict__, self._training.stepper.snapshot()
        try:
            return [
                [{k: encode(v) for k, v in group.items()} for group in snapshot],
                {key: encode(inside[key]) for key in SCALER if key in inside},
            ]
        except TypeError as err:
            raise UsageError(
                f"join() with shard_optimizer: a setting in the optimizer's param groups: {err}"
            ) from None

    def _adopt_settings(self, leader: int, shared: Any) -> GroupSnapshot:
        training = self._training
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
                f"rank {training.collectives.world.rank}: rank {leader} sent malformed optimizer "
                f"settings: {str(shared)[:80]}"
            ) from None
        return snapshot

    @torch.no_grad()
    def _share_gradients(self, answer: Answer) -> None:
        """Broadcast the leader's whole gradients, which it may have clipped or scaled."""
        collectives = self._training.collectives
        rank = collectives.world.rank
        for bucket in self._training.bucketing.buckets:
            bucket.settle()
            if rank == answer.leader:
                for slot in bucket.slots:
                    if slot.param.grad is not None and slot.param.grad is not slot.view:
                        slot.view.copy_(slot.param.grad)
            collectives.broadcast(bucket.flat, answer.leader, label="gradients").wait()
            if answer.follows(rank):
                for slot in bucket.slots:
                    slot.param.grad = slot.view if slot.index in answer.used else None

    # -- plans and state ------------------------------------------------------------------

    @torch.no_grad()
    def on_new_buckets(self) -> None:
        """Move the optimizer's state to its owners under the current plan."""
        self.shards.rebuild(self._training.bucketing.buckets)

    def on_load_state_dict(self) -> None:
        """Keep this worker's part of the whole state that the optimizer has loaded."""
        self.shards.load_from_optimizer()

    def _whole(self) -> State:
        return self.shards.whole()

    def _parts(self) -> int:
        return len(self.shards.state)
