"""What each bucket's gradients travel as, and its codec's residuals."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from wingbeat.codecs import Coding, make
from wingbeat.codecs.coding import Region
from wingbeat.codecs.dense import Dense
from wingbeat.codecs.feedback import Residuals
from wingbeat.collectives import Collectives, Encoded, WireFormat, wire_dtype
from wingbeat.errors import UsageError
from wingbeat.gradients.bucket import Bucket, Slot
from wingbeat.observe.log import log
from wingbeat.types import Choices, Span
from wingbeat.wires import HALF_BYTES, Coded, Half, LowRank, Sketch, TopK

LARGE = 1 << 16
"""Elements from which a gradient travels by itself: worth a table of its own levels, or factors if
it is a fully connected layer's (Canary, section 4.3.1, case 1)."""


class Compression:
    """Tells how a bucket travels; keeps residuals, and counts steps.

    Attributes:
        coded: the codec's settings; None for a mere dtype.
        on: whether gradients go through the codec at present, if there is one.
        residuals: what this worker's gradients still lack; None where nothing is kept.
        collect: adds to residuals here what others keep of them while training goes on.
    """

    collect: Callable[[], None] | None = None

    def __init__(self, wire: str | Coded, slots: Sequence[Slot], collectives: Collectives) -> None:
        world = collectives.world
        self.coded = None if isinstance(wire, str) else wire
        self._dtype = wire_dtype(wire) if isinstance(wire, str) else None
        self._collectives = collectives
        self._made: weakref.WeakKeyDictionary[Bucket, tuple[int, Encoded]] = (
            weakref.WeakKeyDictionary()
        )
        self._held: weakref.WeakKeyDictionary[Bucket, list[tuple[torch.Tensor, torch.Tensor]]] = (
            weakref.WeakKeyDictionary()
        )
        self._step = -1
        self.on = self.coded is not None
        self.residuals: Residuals | None = None
        if self.coded is None:
            return
        if getattr(self.coded, "feedback", isinstance(self.coded, TopK)):
            self.residuals = Residuals(
                {slot.name: tuple(slot.param.shape) for slot in slots},
                rank=world.rank,
                world_size=world.size,
                velocity=self.momentum > 0,
            )

    @property
    def momentum(self) -> float:
        """The factor of momentum correction; 0 for none."""
        return self.coded.momentum if isinstance(self.coded, TopK) else 0.0

    # -- buckets --------------------------------------------------------------------------

    @torch.no_grad()
    def launching(self, bucket: Bucket) -> WireFormat | None:
        """Return what the bucket, whose gradients are complete, travels as this time.

        While the codec is off, residuals go along with the gradients.
        """
        if self.coded is None:
            return self._dtype
        encoded = self._encoded(bucket)
        velocity = self.velocity(bucket)
        kept = [each for each in (encoded.residual, velocity) if each is not None]
        if kept:
            self._give_back(bucket)
            if not bucket.dense:
                self._held[bucket] = [each for flat in kept for each in _hold_back(bucket, flat)]
        if self.on and not self._saves_nothing(bucket):
            return encoded
        if velocity is not None:
            moving = velocity[: bucket.numel]
            moving.mul_(self.momentum).add_(bucket.flat[: bucket.numel])
            bucket.flat[: bucket.numel].copy_(moving)
        if encoded.residual is not None:
            _add_residual(bucket.flat[: bucket.numel], encoded.residual[: bucket.numel])
        return None

    def add_own_residual(self, bucket: Bucket, own: Span) -> None:
        """Add the residual of the block ``own`` to it now, where no second encoding will do so."""
        if isinstance(bucket.wire, Encoded) and bucket.wire.residual is not None:
            part = slice(own.start, min(own.stop, bucket.numel))
            _add_residual(bucket.flat[part], bucket.wire.residual[part])

    def _saves_nothing(self, bucket: Bucket) -> bool:
        return isinstance(self.coded, Half) and bucket.flat.element_size() <= HALF_BYTES

    def changes_alone(self) -> bool:
        """Whether there is anything that `alone` would add to gradients."""
        kept = self.residuals
        return kept is not None and (self.momentum > 0 or not kept.empty)

    @torch.no_grad()
    def alone(self, slot: Slot) -> None:
        """Give a gradient that travels nowhere its momentum, and its residual of an earlier run."""
        grad = slot.param.grad
        if self.residuals is None or grad is None or grad.layout is not torch.strided:
            return
        if self.momentum:
            here = [slot.name], [grad.numel()], grad.numel(), grad.device
            velocity = self.residuals.velocity_for(*here)
            velocity.mul_(self.momentum).add_(grad.reshape(-1))
            grad.copy_(velocity.view(grad.shape))
        residual = self.residuals.take(slot.name)
        if residual is not None:
            grad.add_(residual.view(grad.shape).to(grad.device))

    def velocity(self, bucket: Bucket) -> torch.Tensor | None:
        """Return where momentum correction gathers momentum, as long as the bucket's buffer."""
        if self.momentum == 0 or self.residuals is None:
            return None
        return self.residuals.velocity_for(*_arrangement(bucket))

    def _give_back(self, bucket: Bucket) -> None:
        for part, held in self._held.pop(bucket, ()):
            part.add_(held)

    def _encoded(self, bucket: Bucket) -> Encoded:
        assert self.coded is not None
        step = max(0, self._step)
        if isinstance(self.coded, TopK):
            step = min(step, self.coded.warmup)
        known = self._made.get(bucket)
        if known is None or (known[0] != step and isinstance(self.coded, TopK)):
            residual = None
            if self.residuals is not None:
                residual = self.residuals.flat_for(*_arrangement(bucket))
            coding = Coding(list(_regions(bucket, self.coded, step)))
            known = self._made[bucket] = (step, Encoded(coding, residual))
        return known[1]

    def count_step(self) -> None:
        """Count an iteration: a warm-up goes by it."""
        self._step += 1

    # -- state ----------------------------------------------------------------------------

    def settle(self) -> None:
        """Bring residuals up to date, between iterations: no codec is at work on them any more."""
        for bucket in list(self._made):
            if bucket.handle is not None:
                bucket.handle.wait()
            self._give_back(bucket)
        if self.collect is not None:
            self.collect()

    def state_dict(self) -> dict[str, Any] | None:
        """Return this worker's residuals and the steps made; None where nothing is kept."""
        if self.residuals is None:
            return None
        self.settle()
        return {**self.residuals.state_dict(), "step": self._step}

    def check(self, state: Any) -> None:
        """Raise a `UsageError` unless ``state`` is a part of a run of this model, or None."""
        if self.residuals is not None and state is not None:
            self.residuals.check(state, "load_state_dict(): residuals")
            _step_of(state)

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Take over this worker's part of a run, or begin without residuals.

        Raises:
            UsageError: the part is damaged or of another model.
        """
        self.check(state)
        if self.residuals is None:
            return
        self.settle()
        world = self._collectives.world
        if state is None:
            self.residuals.clear()
            return
        if state.get("world_size") == world.size:
            self.residuals.load_state_dict(state)
        else:
            self.residuals.clear()
        if (state.get("rank"), state.get("world_size")) != (world.rank, world.size):
            log.info(
                "the state is rank %s's of %s workers: what gradients were still to be sent on "
                "other ranks is not in it; optimizer.load_residuals(parts) takes all of them",
                state.get("rank"),
                state.get("world_size"),
            )
        self._step = _step_of(state)

    def load_parts(self, parts: Sequence[dict[str, Any]]) -> None:
        """Take over this worker's share of the residuals of all workers of an earlier run.

        Raises:
            UsageError: no residuals are kept, or a part is missing, damaged or of another model.
        """
        if self.residuals is None:
            raise UsageError(
                "load_residuals(parts): this strategy keeps no residuals; its wire must be "
                "sketch, topk or lowrank with feedback"
            )
        if not isinstance(parts, (list, tuple)) or not parts:
            raise UsageError(
                f"load_residuals({type(parts).__name__}): pass a list of what "
                "residual_state_dict() returned on every worker"
            )
        for position, part in enumerate(parts):
            self.residuals.check(part, f"load_residuals(parts): parts[{position}]")
        step = max(map(_step_of, parts))
        self.settle()
        self.residuals.load_state_dicts(parts)
        self._step = step


def check_momentum(choices: Choices, optimizer: torch.optim.Optimizer) -> None:
    """Raise a `UsageError` where momentum correction would not do what it is for."""
    wire = choices.wire
    if not isinstance(wire, TopK) or wire.momentum == 0:
        return
    if choices.schedule != "wfbp":
        raise UsageError(
            f"{wire}: momentum correction needs whole buckets on each worker, which "
            "wingbeat.AllReduce has; use AllReduce(wire=...) or momentum=0"
        )
    for number, group in enumerate(optimizer.param_groups):
        if group.get("momentum", 0) or "betas" in group:
            raise UsageError(
                f"{wire}: the optimizer ({type(optimizer).__name__}, group {number}) has momentum "
                "of its own, which would count twice; use SGD with momentum=0, or no correction"
            )


def _step_of(state: dict[str, Any]) -> int:
    step = state.get("step", -1)
    if type(step) is not int or step < -1:
        raise UsageError(f"residuals: step {step!r} is no number of steps; save the state anew")
    return step


def _add_residual(part: torch.Tensor, residual: torch.Tensor) -> None:
    """Add the residual; what the gradients' dtype has no room for stays in it."""
    total = part.float() + residual
    part.copy_(total)
    residual.copy_(total - part.float()).nan_to_num_(0.0, 0.0, 0.0)


def _hold_back(
    bucket: Bucket, residual: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Take out the residuals of parameters without a gradient here; yield where, and how much.

    If no worker has one, the sum is not used, and what had been sent of it would be lost.
    """
    start = 0
    for slot in bucket.slots:
        part = residual[start : start + slot.param.numel()]
        start += part.numel()
        if not slot.used:
            held = part.clone()
            part.zero_()
            yield part, held


def _arrangement(bucket: Bucket) -> tuple[list[str], list[int], int, torch.device]:
    names = [slot.name for slot in bucket.slots]
    numels = [slot.param.numel() for slot in bucket.slots]
    return names, numels, bucket.flat.numel(), bucket.flat.device


def _regions(bucket: Bucket, wire: Coded, step: int) -> Iterator[Region]:
    """Yield large gradients by themselves if the codec gains by that, and the rest in runs.

    A run has one codec. The flags at the end travel as they are: who has used a parameter must not
    be rounded.
    """
    start = end = 0
    codec = make(wire, step, bucket.slots[0].name)
    for slot in bucket.slots:
        stop = end + slot.param.numel()
        own = make(wire, step, slot.name)
        alone = isinstance(wire, LowRank | Sketch) and stop - end >= LARGE
        if end > start and (alone or own != codec):
            yield Region(Span(start, end), codec)
            start = end
        if alone:
            matrix = isinstance(wire, LowRank) and slot.param.ndim == 2
            yield Region(Span(end, stop), own, slot.param.shape[1] if matrix else 0)
            start = stop
        codec, end = own, stop
    if end > start:
        yield Region(Span(start, end), codec)
    yield Region(Span(end, bucket.flat.numel()), Dense())
