"""A divided optimizer: each worker updates its own blocks, and takes over the others' parameters.

What starts when is the schedule's (`wingbeat.schedules.sharded`).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from wingbeat.engine.gradients.bucket import Bucket
from wingbeat.engine.gradients.views import Views
from wingbeat.engine.updates import elementwise, tensorwise
from wingbeat.engine.updates.deferred import refuse_evaluating
from wingbeat.engine.updates.divided import DividedUpdate, check_divisible
from wingbeat.engine.updates.owned import OwnedTensors
from wingbeat.engine.updates.shards import Piece, Shards, take_parameter
from wingbeat.engine.updates.sharing import share_gradients, share_settings, taken_over
from wingbeat.engine.updates.stepper import State
from wingbeat.engine.updates.update import Closure, Training
from wingbeat.errors import UsageError
from wingbeat.observe.events import stream
from wingbeat.schedules.events import (
    Defer,
    Forget,
    Phase,
    Place,
    Schedule,
    Share,
    Update,
    UpdateCommand,
    UpdateOwn,
)


class ShardedUpdate(DividedUpdate):
    """Updates this worker's blocks in ``step()``; others are taken over as they are needed.

    Attributes:
        shards: this worker's part of the parameters and of the optimizer's state.

    Raises:
        UsageError: the optimizer cannot be divided, or parameters share memory.
        MismatchError: the workers' optimizers differ.
    """

    option: ClassVar[str] = "shard_optimizer"
    state_is: ClassVar[str] = (
        "shard_optimizer: each worker has a part of it; call optimizer.state_dict() on every rank "
        "for all of it, or optimizer.shard_state_dict()"
    )

    def __init__(self, training: Training, schedule: Schedule, views: Views) -> None:
        refuse_evaluating(training.optimizer)
        each = _how_divided(training.optimizer)
        super().__init__(training, schedule, views)
        check_divisible(training)
        slots = training.bucketing.slots
        kind = Shards if each is not None else OwnedTensors
        self.shards = kind(
            training.optimizer, training.stepper, training.collectives, slots, each or {}
        )

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
        shape = piece.stand_in.shape
        if self._reduced:
            return bucket.flat[piece.place.start : piece.place.stop].view(shape)
        grad = piece.slot.param.grad
        if grad is None:
            return None
        return grad.reshape(-1)[piece.span.start : piece.span.stop].view(shape)

    def _place(self, bucket: Bucket) -> None:
        """Put this worker's parameters in the place of its gradients.

        In their own dtype, whatever the wire of the gradients is: rounded parameters would not
        come back to what the optimizer made of them.
        """
        bucket.settle()
        for piece in self.shards.pieces_in(bucket):
            bucket.flat[piece.place.start : piece.place.stop].copy_(piece.stand_in.reshape(-1))

    def _forget(self, spent: frozenset[int] | None) -> None:
        self.shards.steps += spent is not None
        super()._forget(spent)

    def _take_over(self, bucket: Bucket) -> None:
        """Take over the bucket's new parameters."""
        self._due.remove(bucket)
        own = {piece.slot.index: piece for piece in self.shards.pieces_in(bucket)}
        for slot in self._fresh.pop(bucket.index):
            take_parameter(slot, own.get(slot.index))

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

    def _whole(self) -> State:
        """Gather it; every worker must come here."""
        return self.shards.whole()

    def _parts(self) -> int:
        return len(self.shards.state)


def _how_divided(optimizer: torch.optim.Optimizer) -> dict[str, bool] | None:
    """Return which state has a value for each element; None if parameters are owned as wholes.

    Raises:
        UsageError: neither is possible.
    """
    try:
        return elementwise.prove(optimizer, type(optimizer).step)
    except UsageError:
        tensorwise.prove(optimizer)
        return None
