"""A divided optimizer: each worker updates its own blocks, and takes over the others' parameters.

What starts when is the schedule's (`wingbeat.schedules.sharded`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from wingbeat.errors import MismatchError, UsageError
from wingbeat.gradients.bucket import Bucket, Slot
from wingbeat.gradients.convert import refuse_overlapping
from wingbeat.gradients.views import Views, replaced
from wingbeat.observe.events import stream
from wingbeat.schedules.events import (
    Defer,
    Forget,
    GradientsNeeded,
    OthersStep,
    Phase,
    Place,
    Schedule,
    Share,
    StepCalled,
    Update,
    UpdateCommand,
    UpdateOwn,
)
from wingbeat.updates import elementwise
from wingbeat.updates.deferred import evaluated, refuse_evaluating
from wingbeat.updates.due import Due
from wingbeat.updates.shards import DividedState, Piece, Shards, take_parameter
from wingbeat.updates.sharing import SCALER, share_gradients, share_settings, taken_over
from wingbeat.updates.stepper import GroupSnapshot, step_outside
from wingbeat.updates.update import Closure, Host, Training


class ShardedUpdate:
    """Updates this worker's blocks in ``step()``; others are taken over as they are needed.

    A step uses the gradients up: the buffers hold parameters afterwards.

    Attributes:
        shards: this worker's part of the parameters and of the optimizer's state.

    Raises:
        UsageError: the optimizer cannot be divided, or parameters share memory.
        MismatchError: the workers' optimizers differ.
    """

    defers: ClassVar[bool] = True
    agrees: ClassVar[bool] = True

    def __init__(self, training: Training, schedule: Schedule, views: Views) -> None:
        refuse_evaluating(training.optimizer)
        each = elementwise.prove(training.optimizer, type(training.optimizer).step)
        self._training = training
        self._schedule = schedule
        self._views = views
        slots = training.bucketing.slots
        _check_same_groups(training)
        refuse_overlapping({slot.name: slot.param for slot in slots})
        self._due = Due(training.refresh)
        self.shards = Shards(
            training.optimizer, training.stepper, training.collectives, slots, each
        )
        self._snapshot: GroupSnapshot = []
        self._spent: list[Slot] = []
        self._fresh: dict[int, list[Slot]] = {}
        self._has_whole_state = False

    # -- the step -------------------------------------------------------------------------

    def step(self, host: Host, closure: Closure) -> Any:
        """Update this worker's blocks, queue every all-gather, first needed first, and return.

        A ``closure`` is called once, before the step.

        Raises:
            UsageError: a step has used the gradients up.
        """
        training, slots = self._training, self._training.bucketing.slots
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
        used = [slot.used if self._reduced else slot.param.grad is not None for slot in slots]
        self._step(host, StepCalled(used=frozenset(i for i, is_used in enumerate(used) if is_used)))
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

    # -- what the schedule says ------------------------------------------------------------

    def perform(self, command: UpdateCommand, closure: Closure) -> Any:  # noqa: ARG002
        """Do one part of a step, or take over what others have done."""
        buckets = self._training.bucketing.buckets
        match command:
            case UpdateOwn(number, used):
                with stream.timed("update", bucket=number):
                    self._update_own(buckets[number], used)
            case Share(answer):
                self._share(answer)
            case Place(number):
                self._place(buckets[number])
            case Defer(number, used):
                self._defer(buckets[number], used or frozenset())
            case Forget(spent):
                self._forget(spent)
            case Update(number):
                with stream.timed("update", bucket=number):
                    self._take_over(buckets[number])

    def _defer(self, bucket: Bucket, used: frozenset[int]) -> None:
        self._fresh[bucket.index] = [slot for slot in bucket.slots if slot.index in used]
        self._due.add(bucket, (slot.param for slot in self._fresh[bucket.index]))

    def _share(self, answer: Any) -> None:
        shared = share_settings(self._training, answer)
        if self._schedule.phase is Phase.WHOLE:
            share_gradients(self._training, answer)
        if answer.follows(self._training.collectives.world.rank):
            self._snapshot = taken_over(self._training, answer, shared)

    def _update_own(self, bucket: Bucket, used: frozenset[int]) -> None:
        """Run the optimizer on this worker's pieces of ``bucket``, where gradients are known."""
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
        if self._reduced:
            return bucket.flat[piece.place.start : piece.place.stop]
        grad = piece.slot.param.grad
        return None if grad is None else grad.reshape(-1)[piece.span.start : piece.span.stop]

    def _place(self, bucket: Bucket) -> None:
        """Put this worker's parameters in the place of its gradients.

        In their own dtype, whatever the wire of the gradients is: rounded parameters would not
        come back to what the optimizer made of them.
        """
        bucket.settle()
        for piece in self.shards.pieces_in(bucket):
            bucket.flat[piece.place.start : piece.place.stop].copy_(piece.stand_in)

    def _forget(self, spent: frozenset[int] | None) -> None:
        """Have nobody take for gradients what is none any more."""
        self.shards.steps += spent is not None
        if spent is not None:
            for slot in self._training.bucketing.slots:
                if slot.index in spent or slot.param.grad is slot.pending:
                    slot.param.grad = None
                if slot.index in spent:
                    self._spent.append(slot)
        self._views.drop()

    def _take_over(self, bucket: Bucket) -> None:
        """Take over the bucket's new parameters."""
        self._due.remove(bucket)
        own = {piece.slot.index: piece for piece in self.shards.pieces_in(bucket)}
        for slot in self._fresh.pop(bucket.index):
            take_parameter(slot, own.get(slot.index))

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

    def refuse_lost(self, what: str) -> None:
        """Raise a `UsageError` if ``what`` needs gradients that a step has used up."""
        if self._spent:
            raise UsageError(
                f"{what}: with shard_optimizer a step uses the gradients up, and nothing can be "
                "added to them; call optimizer.zero_grad() between step() and backward(), and "
                "backward() before each step()"
            )

    # -- plans and state ------------------------------------------------------------------

    @torch.no_grad()
    def planned(self) -> None:
        """Move the optimizer's state to whom it belongs under the plan in force."""
        buckets = self._training.bucketing.buckets
        if self.shards.built:
            self.shards.rebuild(buckets)
            return
        self.shards.build(buckets)
        self.shards.take_over()

    def loaded(self) -> None:
        """The optimizer has loaded a whole state: keep this worker's part."""
        self.shards.take_over()

    @contextlib.contextmanager
    def whole_state(self, host: Host) -> Iterator[None]:
        """Let the optimizer hold the whole state inside; every worker must come here."""
        host.settle()
        inside = self._training.optimizer.__dict__
        kept, inside["state"] = inside["state"], self.shards.whole()
        self._has_whole_state = True
        try:
            yield
        finally:
            inside["state"] = kept
            self._has_whole_state = False

    def visible_state(self) -> Any:
        """Return the optimizer's state where it is whole, and else what refuses to be read."""
        state = self._training.optimizer.__dict__["state"]
        if self._training.stepper.stepping or self._has_whole_state or not self.shards.state:
            return state
        return DividedState(len(self.shards.state))

    def detach(self) -> None:
        """Give the optimizer its whole state back."""
        self._training.optimizer.__dict__["state"] = self.shards.whole()


def _check_same_groups(training: Training) -> None:
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
                "param groups; with shard_optimizer all ranks must build the same"
            )
