"""The encoding of each bucket's gradients, and the residuals of its codec."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from wingbeat.codecs import Coding
from wingbeat.codecs.codec import Dense
from wingbeat.codecs.coding import Region, regions
from wingbeat.codecs.feedback import MOST_STEPS, Residuals, check_complete
from wingbeat.codecs.lowrank import Factors, Matrix, check_starts, restart
from wingbeat.collectives import (
    Collectives,
    Encoded,
    WireFormat,
    encoded_of,
    factors_of,
    wire_dtype,
)
from wingbeat.compression import (
    Coded,
    codec_of,
    for_parameter,
    options_of,
    unmatched_patterns,
)
from wingbeat.engine.gradients.bucket import Bucket, Slot
from wingbeat.engine.gradients.placed import copies, local
from wingbeat.errors import UsageError
from wingbeat.observe.log import log
from wingbeat.parts.strategy import Strategy
from wingbeat.schema import excerpt
from wingbeat.types import Span


class Compression:
    """Chooses the encoding of each bucket, keeps residuals, and counts steps.

    Attributes:
        coded: the codec's settings; None for a plain dtype.
        factored: whether gradients are sent as low-rank factors that all-reduces sum.
        on: whether the codec, if there is one, is enabled.
        dense: names of parameters that are not encoded, because several ranks of a replica hold
            them. A codec rounds a value as its neighbours require, which differ between the ranks.
        residuals: the unsent part of this worker's gradients; None if none is kept.
        collect: adds the residuals that other objects hold during training.
        on_host: whether residuals are on the host, where the exchange encodes, and not beside the
            gradients.

    Raises:
        UsageError: a group matches no parameter, or momentum correction is impossible because
            several ranks of a replica hold a parameter.
    """

    collect: Callable[[], None] | None = None
    on_host = False

    def __init__(
        self,
        wire: str | Coded,
        slots: Sequence[Slot],
        collectives: Collectives,
        *,
        sums: bool = False,
    ) -> None:
        self.coded = codec_of(wire)
        self.factored = sums and self.coded is not None and self.coded.summed
        self._starts: dict[str, torch.Tensor] = {}
        self._dtype = wire_dtype(options_of(wire).dtype)
        self._collectives = collectives
        self._made: weakref.WeakKeyDictionary[Bucket, tuple[int, Encoded | Factors | None]] = (
            weakref.WeakKeyDictionary()
        )
        self._held: weakref.WeakKeyDictionary[Bucket, list[tuple[torch.Tensor, torch.Tensor]]] = (
            weakref.WeakKeyDictionary()
        )
        self._step = -1
        self.on = self.coded is not None
        self.dense: frozenset[str] = frozenset()
        self.residuals: Residuals | None = None
        if self.coded is None:
            return
        _check_groups(self.coded, slots)
        inside = collectives.world.inside
        if inside is not None:
            held = {slot.name: copies(slot.param, inside) for slot in slots}
            self.dense = frozenset(name for name, number in held.items() if number > 1)
        if self.dense and self.momentum:
            raise UsageError(
                f"{self.coded}: momentum correction needs codecs for all parameters, and several "
                f"ranks of a replica hold {min(self.dense)!r}, which is sent unencoded: write "
                "momentum=0"
            )
        if self.coded.keeps or self.coded.ends_after is not None:  # the state contains the step
            self.residuals = self.new_residuals(slots, velocity=self.momentum > 0)

    def new_residuals(self, slots: Sequence[Slot], velocity: bool = False) -> Residuals:
        """Return residuals of zero for this worker's gradients."""
        world = self._collectives.world
        shapes = {slot.name: tuple(slot.shape) for slot in slots}
        # Numbers in a column are those of replicas.
        worker = "rank" if world.replica is None else "replica"
        return Residuals(
            shapes, rank=world.rank, world_size=world.size, velocity=velocity, worker=worker
        )

    def use(self, coded: Coded | None) -> None:
        """Encode the buckets that are made next as ``coded``, None: not; the same on all workers.

        It is the strategy's codec, or differs from it in the number of bits alone.
        """
        self.on = coded is not None
        self.coded = coded or self.coded

    @property
    def coding(self) -> bool:
        """Whether gradients go through the codec in this iteration."""
        ends = None if self.coded is None else self.coded.ends_after
        return self.on and (ends is None or max(0, self._step) < ends)

    @property
    def settled(self) -> bool:
        """Whether the codec's warm-up is over."""
        wire = self.coded if self.on else None
        return wire is None or not wire.gathers or self._step > wire.warmup_steps

    @property
    def momentum(self) -> float:
        """The factor of momentum correction; 0 for none."""
        return 0.0 if self.coded is None else self.coded.momentum

    # -- buckets --------------------------------------------------------------------------

    @torch.no_grad()
    def launching(self, bucket: Bucket) -> WireFormat | None:
        """Return the encoding of a complete bucket; add residuals that the codec will not send."""
        if self.coded is None:
            return self._dtype
        encoded = self._encoded(bucket)
        if encoded is None or encoded.residual is None:
            self._add_left_over(bucket)
        if encoded is None:
            return None
        velocity = self.velocity(bucket)
        kept = [each for each in (encoded.residual, velocity) if each is not None]
        if kept:
            self._restore_held(bucket)
            if not bucket.dense:
                self._held[bucket] = [each for flat in kept for each in _hold_back(bucket, flat)]
        if self.coding and not self._saves_nothing(bucket):
            return encoded
        if velocity is not None:
            moving = velocity[: bucket.numel]
            moving.mul_(self.momentum).add_(bucket.flat[: bucket.numel])
            bucket.flat[: bucket.numel].copy_(moving)
        if encoded.residual is not None:
            _add_residual(bucket.flat[: bucket.numel], encoded.residual[: bucket.numel])
        return None

    def encoded(self, bucket: Bucket) -> Encoded | None:
        """Return the codec's encoding of a bucket; None where there is none."""
        made = None if self.coded is None else self._encoded(bucket)
        assert factors_of(made) is None, "this exchange does not sum factors"
        return encoded_of(made)

    def add_own_residual(self, bucket: Bucket, own: Span) -> None:
        """Add the residual of the block ``own``, if no second encoding adds it."""
        encoded = encoded_of(bucket.wire)
        if encoded is not None and encoded.residual is not None:
            part = slice(own.start, min(own.stop, bucket.numel))
            _add_residual(bucket.flat[part], encoded.residual[part])

    def _saves_nothing(self, bucket: Bucket) -> bool:
        return self.coded is not None and bucket.flat.element_size() <= self.coded.rounded_bytes

    def _add_left_over(self, bucket: Bucket) -> None:
        """Add and drop residuals from other buckets or an earlier run."""
        if self.residuals is None:
            return
        for slot in bucket.slots:
            residual = self.residuals.take(slot.name) if slot.used else None
            if residual is not None:
                slot.view.add_(residual.view(slot.shape).to(slot.view.device))

    @torch.no_grad()
    def complete_alone(self, slots: Sequence[Slot]) -> None:
        """Apply momentum and an earlier run's residuals to a single worker's gradients."""
        kept = self.residuals
        if kept is None or not (self.momentum or not kept.empty):
            return
        for slot in slots:
            grad = None if slot.param.grad is None else local(slot.param.grad)
            if grad is None or grad.layout is not torch.strided:
                continue
            if self.momentum:
                velocity = kept.velocity_for([slot.name], [grad.numel()], grad.numel(), grad.device)
                velocity.mul_(self.momentum).add_(grad.reshape(-1))
                grad.copy_(velocity.view(grad.shape))
            residual = kept.take(slot.name)
            if residual is not None:
                grad.add_(residual.view(grad.shape).to(grad.device))

    def velocity(self, bucket: Bucket) -> torch.Tensor | None:
        """Return the velocity of momentum correction, with the length of the bucket's buffer."""
        if self.momentum == 0 or self.residuals is None:
            return None
        return self.residuals.velocity_for(*arrangement(bucket))

    def _restore_held(self, bucket: Bucket) -> None:
        for part, held in self._held.pop(bucket, ()):
            part.add_(held)

    def _encoded(self, bucket: Bucket) -> Encoded | Factors | None:
        """Return the encoding; None if all the bucket's parameters are sent unencoded."""
        assert self.coded is not None
        step = min(max(0, self._step), self.coded.warmup_steps)
        known = self._made.get(bucket)
        if known is None or known[0] != step:
            known = self._made[bucket] = (step, self._make(bucket, self.coded, step))
        return known[1]

    def _make(self, bucket: Bucket, wire: Coded, step: int) -> Encoded | Factors | None:
        dense = self.dense
        matrices = list(_matrices(bucket, wire, dense)) if self.factored else []
        found = [] if self.factored else list(_regions(bucket, wire, step, dense))
        if not matrices and all(region.codec.lossless for region in found):
            return None
        residual = None
        if self.residuals is not None and wire.keeps:
            names, numels, length, device = arrangement(bucket)
            device = torch.device("cpu") if self.on_host else device
            residual = self.residuals.flat_for(names, numels, length, device)
        if not matrices:
            return Encoded(Coding(found), residual)
        workers, flat = self._collectives.world.size, bucket.flat
        return Factors(matrices, flat.numel(), workers, residual, self._starts, flat.device)

    def count_step(self) -> None:
        """Count an iteration, on which warm-up depends."""
        self._step += 1

    def follow(self, root: int) -> None:
        """Keep the residuals, which stay valid after all workers have copied ``root``'s weights."""

    # -- state ----------------------------------------------------------------------------

    def settle(self) -> None:
        """Update residuals between iterations, when no codec uses them."""
        for bucket in list(self._made):
            if bucket.handle is not None:
                bucket.handle.wait()
            self._restore_held(bucket)
        if self.collect is not None:
            self.collect()

    def state_dict(self) -> dict[str, Any] | None:
        """Return this worker's residuals and the number of steps; None where none are kept."""
        if self.residuals is None:
            return None
        self.settle()
        state = {**self.residuals.state_dict(), "step": self._step}
        if self.factored:
            state["starts"] = {name: start.clone() for name, start in self._starts.items()}
        return state

    def check(self, state: Any) -> None:
        """Raise a `UsageError` unless ``state`` is None, or one worker's state of this model."""
        if state is not None:
            self._check_one(state, "load_state_dict(): residuals")

    def _check_one(self, state: Any, where: str) -> None:
        if self.residuals is not None:
            self.residuals.check(state, where)
            _step_of(state)
            check_starts(state, where)

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Load this worker's state; None resets the residuals. Raises as `check`."""
        self.check(state)
        if self.residuals is None:
            return
        self.settle()
        world = self._collectives.world
        restart(self._starts, {} if state is None else state.get("starts", {}))
        if state is None:
            self.residuals.clear()
            return
        if state.get("world_size") == world.size:
            self.residuals.load_state_dict(state)
        else:
            self.residuals.clear()
        if (state.get("rank"), state.get("world_size")) != (world.rank, world.size):
            log.info(
                "the state is %s %s's of %s workers and does not contain the unsent gradients of "
                "the others; optimizer.load_residuals(parts) loads those of all",
                self.residuals.worker,
                state.get("rank"),
                state.get("world_size"),
            )
        self._step = _step_of(state)

    def check_parts(self, parts: Any, where: str) -> None:
        """Raise a `UsageError` that begins with ``where`` for invalid parts of residuals."""
        if self.residuals is None:
            return
        if not isinstance(parts, (list, tuple)) or not parts:
            raise UsageError(
                f"{where}({type(parts).__name__}): pass a list of what residual_state_dict() "
                "returned on every worker"
            )
        for position, part in enumerate(parts):
            self._check_one(part, f"{where}(parts): parts[{position}]")
        check_complete(parts, self.residuals.worker)

    def load_parts(self, parts: Sequence[dict[str, Any]]) -> None:
        """Load a share of an earlier run's residuals; raise a `UsageError` for invalid parts."""
        if self.residuals is None:
            raise no_residuals("load_residuals(parts)")
        self.check_parts(parts, "load_residuals")
        step = max(map(_step_of, parts))
        self.settle()
        self.residuals.load_state_dicts(parts)
        first = min(parts, key=lambda part: int(part["rank"]))  # equal in all parts
        restart(self._starts, first.get("starts", {}))
        self._step = step


def no_residuals(call: str) -> UsageError:
    """Return the refusal of a call that needs residuals."""
    return UsageError(
        f"{call}: this strategy keeps no residuals; its compression must be sketch, topk or "
        "lowrank with feedback"
    )


def check_momentum(strategy: Strategy, optimizer: torch.optim.Optimizer) -> None:
    """Raise a `UsageError` where momentum correction is not possible."""
    wire = strategy.codec
    if wire is None or wire.momentum == 0:
        return
    if strategy.schedule.machine != "wfbp":
        raise UsageError(
            f"{wire}: momentum correction needs whole buckets on each worker, which "
            "wingbeat.AllReduce has; use AllReduce(compression=...) or momentum=0"
        )
    for number, group in enumerate(optimizer.param_groups):
        if group.get("momentum", 0) or "betas" in group:
            raise UsageError(
                f"{wire}: the optimizer ({type(optimizer).__name__}, group {number}) has momentum "
                "of its own, which would count twice; use SGD with momentum=0, or no correction"
            )


def _step_of(state: dict[str, Any]) -> int:
    step = state.get("step", -1)
    if type(step) is not int or not -1 <= step <= MOST_STEPS:
        raise UsageError(
            f"residuals: step {excerpt(step)} is no number of steps; save the state again"
        )
    return step


def _add_residual(part: torch.Tensor, residual: torch.Tensor) -> None:
    """Add the residual; the rounding error of the gradients' dtype remains in it."""
    total = part.float() + residual.to(part.device)
    part.copy_(total)
    residual.copy_(total - part.float()).nan_to_num_(0.0, 0.0, 0.0)


def _hold_back(
    bucket: Bucket, residual: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Zero residuals of unused parameters, whose sum may be discarded; yield places and values."""
    start = 0
    for slot in bucket.slots:
        part = residual[start : start + slot.shape.numel()]
        start += part.numel()
        if not slot.used:
            held = part.clone()
            part.zero_()
            yield part, held


def arrangement(bucket: Bucket) -> tuple[list[str], list[int], int, torch.device]:
    """Return the layout of a bucket's residual: names, element counts, length and device."""
    names = [slot.name for slot in bucket.slots]
    numels = [slot.shape.numel() for slot in bucket.slots]
    return names, numels, bucket.flat.numel(), bucket.flat.device


def _regions(bucket: Bucket, wire: Coded, step: int, dense: Collection[str]) -> Iterator[Region]:
    """Yield the parameters' regions, then a dense one for the flags, which must not be rounded."""
    yield from regions(wire, [(slot.name, slot.shape) for slot in bucket.slots], step, dense)
    yield Region(Span(bucket.numel, bucket.flat.numel()), Dense())


def _matrices(bucket: Bucket, wire: Coded, dense: Collection[str]) -> Iterator[Matrix]:
    """Yield the parameters that are sent as factors, by their layout in the buffer."""
    start = 0
    for slot in bucket.slots:
        mine = options_of(for_parameter(wire, slot.name))
        # Dimensions with the largest strides form the rows.
        strides = slot.view.stride()
        order = sorted(range(slot.view.dim()), key=lambda dim: -strides[dim])
        rows, cols = mine.matrix_of([slot.shape[dim] for dim in order])
        if rows and slot.name not in dense:
            yield Matrix(slot.name, start, rows, cols, mine.rank)
        start += slot.shape.numel()


def _check_groups(wire: Coded, slots: Sequence[Slot]) -> None:
    """Refuse groups that match no parameter, or a parameter that no codec supports."""
    names = [slot.name for slot in slots]
    for pattern in unmatched_patterns(wire, names) if names else ():
        raise UsageError(
            f"{type(wire).__name__}(groups=...): {pattern!r} matches no trained parameter; their "
            f"names are {names[0]!r} to {names[-1]!r}: correct the pattern, or leave it out"
        )
    for slot in slots:
        if slot.param.dtype is torch.float64 and not for_parameter(wire, slot.name):
            raise UsageError(
                f'{type(wire).__name__}(groups=...): {slot.name!r} is float64, and "fp32" in a '
                "group is float32; convert it, or leave it to the codec, which keeps the rest"
            )
