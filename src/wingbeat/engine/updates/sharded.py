"""A divided optimizer: each worker updates its own blocks, and gathers the others' parameters.

The schedule decides the order of operations (`wingbeat.schedules.dear`).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from wingbeat.engine.gradients.bucket import Bucket
from wingbeat.engine.gradients.views import ShownGradients
from wingbeat.engine.updates.deferred import refuse_evaluating
from wingbeat.engine.updates.divided import (
    DividedUpdate,
    adopt_settings,
    check_divisible,
    share_gradients,
    share_settings,
)
from wingbeat.engine.updates.shards import Piece, Shards, copy_parameter
from wingbeat.engine.updates.stepper import State
from wingbeat.engine.updates.tensor_shards import TensorShards
from wingbeat.engine.updates.trials import prove_elementwise, prove_tensorwise
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
        refuse_evaluating(training.optimizer)
        each = _elementwise_state(training.optimizer)
        super().__init__(training, schedule, views)
        check_divisible(training)
        slots = training.bucketing.slots
        kind = Shards if each is not None else TensorShards
        self.shards = kind(
            training.optimizer, training.stepper, training.collectives, slots, each or {}
        )

    # -- commands of the schedule ----------------------------------------------------------

    def perform(self, command: UpdateCommand, closure: Closure) -> Any:  # noqa: ARG002
        """Perform one part of a step, or copy parameters that peers have updated."""
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
                    self._copy_parameters(buckets[number])

    def _share(self, answer: Any) -> None:
        shared = share_settings(self._training, answer)
        if self._schedule.phase is Phase.WHOLE:
            share_gradients(self._training, answer)
        if answer.follows(self._training.collectives.world.rank):
            self._snapshot = adopt_settings(self._training, answer, shared)

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
        for piece in self.shards.pieces_in(bucket):
            bucket.flat[piece.place.start : piece.place.stop].copy_(piece.stand_in.reshape(-1))

    def _forget(self, spent: frozenset[int] | None) -> None:
        self.shards.steps += spent is not None
        super()._forget(spent)

    def _copy_parameters(self, bucket: Bucket) -> None:
        self._pending.remove(bucket)
        own = {piece.slot.index: piece for piece in self.shards.pieces_in(bucket)}
        for slot in self._fresh.pop(bucket.index):
            copy_parameter(slot, own.get(slot.index))

    # -- plans and state ------------------------------------------------------------------

    @torch.no_grad()
    def on_new_buckets(self) -> None:
        """Move the optimizer's state to its owners under the current plan."""
        buckets = self._training.bucketing.buckets
        if self.shards.built:
            self.shards.rebuild(buckets)
            return
        self.shards.build(buckets)
        self.shards.take_over()

    def on_load_state_dict(self) -> None:
        """Keep this worker's part of the whole state that the optimizer has loaded."""
        self.shards.take_over()

    def _whole(self) -> State:
        return self.shards.whole()

    def _parts(self) -> int:
        return len(self.shards.state)


def _elementwise_state(optimizer: torch.optim.Optimizer) -> dict[str, bool] | None:
    """Return which state has one value per element; None if only whole parameters can be owned."""
    try:
        return prove_elementwise(optimizer, type(optimizer).step)
    except UsageError:
        prove_tensorwise(optimizer)
        return None
