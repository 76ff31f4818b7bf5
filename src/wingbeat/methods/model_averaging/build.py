"""Builds the runtime of strategies that average models (Ripples, AD-PSGD, LocalSGD, DiLoCo)."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from wingbeat import schedules
from wingbeat.codecs import Coding
from wingbeat.codecs.codec import Bf16Codec
from wingbeat.codecs.coding import Region, regions
from wingbeat.collectives import wire_dtype
from wingbeat.compression import Coded, options_of
from wingbeat.engine.context import BuildContext
from wingbeat.engine.gradients.bucket import Slot
from wingbeat.engine.gradients.compression import Compression
from wingbeat.engine.gradients.placed import local
from wingbeat.engine.gradients.views import ShownGradients
from wingbeat.engine.hooks import WeakCall
from wingbeat.engine.runtime import Runtime
from wingbeat.engine.updates.update import Training
from wingbeat.errors import MismatchError, UsageError
from wingbeat.methods.model_averaging.flat import ElementState, FlatModel, buffer_dtype, is_narrow
from wingbeat.methods.model_averaging.group_all_reduce import ModelCompression
from wingbeat.methods.model_averaging.group_averager import GroupAverager, GroupSession
from wingbeat.methods.model_averaging.local import LiveState, LocalUpdate
from wingbeat.methods.model_averaging.options import (
    Averaged,
    Groups,
    Local,
    Outer,
    Pairs,
    PartnersPart,
)
from wingbeat.methods.model_averaging.outer import ChosenOptimizer, Nesterov, OuterUpdate
from wingbeat.methods.model_averaging.pair_averager import PairAverager
from wingbeat.methods.model_averaging.rules import Unmerged
from wingbeat.observe.log import log, log_event
from wingbeat.planning import plans
from wingbeat.schedules.events import Operation
from wingbeat.transport.world import World
from wingbeat.types import Fusion, Span

if TYPE_CHECKING:
    from wingbeat.engine.gradients.bucket import Bucket
    from wingbeat.observe.meter import Section


class ModelExchange:
    """The exchange of a runtime without gradient exchange; the update averages models."""

    def __init__(self, sections: Callable[[], Sequence[Section]]) -> None:
        self.sections = sections

    def start(self, operation: Operation, bucket: Bucket, chained: bool = False) -> None:
        """Not supported."""
        raise NotImplementedError(f"{operation} of bucket {bucket.index}")

    def planned(self, buckets: Sequence[Bucket], forward: Sequence[Bucket]) -> None:
        """Do nothing: there are no buckets."""
        assert not [*buckets, *forward], "model averaging has no buckets"


def build_runtime(partners: PartnersPart, context: BuildContext) -> Runtime:
    """Return the runtime of a model that is averaged."""
    training, strategy = context.training, context.strategy
    bucketing, world = training.bucketing, context.world
    steps = cast(Local, strategy.schedule)
    outer = strategy.update_part if isinstance(strategy.update_part, Outer) else None
    _check(context, partners)
    fragments = _fragments(training, bucketing.fusion)
    slots = [slot for part in fragments for slot in part]
    averages_state = outer is None and cast(Averaged, strategy.update_part).state
    state = _averaged_state(training, slots) if averages_state else None
    frozen = _floating([param for _, param in bucketing.frozen])
    buffers = context.buffers  # the model lives longer than the context, which holds the engine
    chosen = _chosen_optimizer(fragments, outer, [*_floating(buffers()), *frozen])
    model = _flat_model(fragments, outer, chosen, lambda: _floating(buffers()), state, frozen)
    _check_alike(training, chosen)
    # Rounded models need error feedback, because most steps are smaller than the rounding error.
    # Pairs and outer optimizers round differences.
    rounds_models = outer is None and partners.averages_models
    compressed = _model_compression(
        strategy.wire, slots, context.compression, len(model.trained), rounds_models=rounds_models
    )
    averager = partners.build_averager(world, model, compressed)
    schedule = schedules.Local(steps.every, steps.delay, len(fragments))
    update: LocalUpdate
    if outer is None:
        update = LocalUpdate(training, model, averager, schedule)
    else:
        weighted = outer.weights != "equal"
        update = OuterUpdate(
            training, model, averager, schedule, [slot.name for slot in slots],
            chosen or Nesterov(model, outer.lr, outer.momentum), shared=partners.everyone,
            alpha=outer.alpha,
            unmerged=Unmerged(len(fragments), outer.weights) if weighted else None,
        )  # fmt: skip
    if partners.waits:
        _in_groups[world.parent or world] = weakref.ref(update)
    runtime = context.assemble(
        schedule, ModelExchange(averager.sections), ShownGradients(bucketing), update
    )
    update.waited = WeakCall(runtime.waited)
    if isinstance(averager, GroupAverager):  # a PairAverager closes itself
        _close_with(update, averager, world)
        state_of_worker = LiveState(training, update)
        session = averager.session
        session.snapshot = state_of_worker.written
        # If workers share one model, a worker is active from the moment that it has a peer's state.
        shared = outer is not None and partners.everyone
        if shared:
            session.copy_state_when_excluded()
        update.renew = functools.partial(_copy_state, world, session, state_of_worker, join=shared)
        if world.returned:
            state_of_worker.put(session.fetch_state(join=shared))
    return runtime


def check_modules(model: torch.nn.Module) -> None:
    """Raise a `UsageError` for a module that does not support averages in groups or pairs."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.SyncBatchNorm):
            raise UsageError(
                f"{name!r} is a torch.nn.SyncBatchNorm, which waits for all workers in each "
                "forward, while others may wait in groups of some (Ripples, ADPSGD); use "
                "torch.nn.BatchNorm, or LocalSGD()"
            )


_in_groups: Any = weakref.WeakKeyDictionary()
"""By world of all workers: a weak reference to the update of the model that groups average."""


def _copy_state(world: World, session: GroupSession, state: LiveState, *, join: bool) -> None:
    if not session.must_fetch:
        return
    late = join and not session.client.stale  # no other worker has these steps
    if late:
        log.debug(
            "an average was made without this worker, which took too long: it copies the shared "
            "model, and its steps are merged in the next average"
        )
    else:
        log_event(
            "excluded",
            f"{world.me}: groups continued without this worker, which took too long: it copies a "
            "peer's model",
            rank=world.ranks[world.rank],
        )
    state.put(session.fetch_state(join=join), keep=late)


def _close_with(update: LocalUpdate, averager: GroupAverager, world: World) -> None:
    """Close the averager with the world, or when the update is garbage-collected."""
    world.on_close(averager.close)
    # The garbage collector must not wait for other workers.
    closing = threading.Thread(target=averager.close, name="wingbeat-ending", daemon=True)
    weakref.finalize(update, closing.start).atexit = False


def _check(context: BuildContext, partners: PartnersPart) -> None:
    """Raise a `UsageError` for a model that cannot be averaged at this time."""
    world = context.world
    other = _in_groups.get(world.parent or world, lambda: None)()
    if partners.waits and other is not None and not other.left:
        raise UsageError(
            "models are averaged in groups (Ripples) one model at a time: workers would wait for "
            "each other in groups of different models; distribute one module that contains both, "
            "call wingbeat.release() on the first, or use LocalSGD()"
        )


def _fragments(training: Training, fusion: Fusion) -> list[list[Slot]]:
    """Return the parameters of each fragment, in the order in which forward reads them."""
    bucketing = training.bucketing
    # By whole shapes: the parts of the ranks of a replica have different sizes, and some are empty.
    specs = [
        replace(spec, shape=tuple(slot.param.shape))
        for spec, slot in zip(bucketing.specs, bucketing.slots, strict=True)
    ]
    plan = plans.make_plan(fusion, specs, bucketing.ready_order)
    return [
        [bucketing.slots[index] for index in sorted(bucket.tensors)]
        for bucket in reversed(plan.buckets)
    ]


def _averaged_state(training: Training, slots: Sequence[Slot]) -> ElementState:
    """Return the optimizer's state to average, after checking that it is equal on all workers."""
    state = ElementState(training.optimizer, {slot.param: slot.name for slot in slots})
    own = state.described()
    if differs := _find_other(training, "averaged state", own):
        me, rank, theirs = differs
        raise MismatchError(
            f"rank {me}'s optimizer has the state {_difference(own, theirs)}, rank {rank}'s "
            f"{_difference(theirs, own)}: with average_state=True all ranks must build equal "
            "optimizers"
        )
    return state


def _find_other(training: Training, what: str, own: Any) -> tuple[int, int, Any] | None:
    """Compare a description with all workers'.

    Return this worker's rank, and the rank and description of the first one that differs.
    """
    channel = training.collectives.world
    # A restarted worker finds the channel's number, but not its keys.
    world, key = channel.parent or channel, f"{what} {channel.serial}"
    if not world.returned:
        world.publish(key, own)
    for rank in range(world.size):
        theirs = world.read(key, rank)
        if theirs != own:
            return world.ranks[world.rank], world.ranks[rank], theirs
    return None


def _difference(description: Any, other: Any) -> str:
    """Return the first item of an `ElementState.described` that the other one lacks."""
    try:
        name, kept = next(each for each in description if each not in other)
        return f"{kept[:80] or 'nothing'} of {name!r:.80}"
    except (TypeError, ValueError, StopIteration):
        return f"{description!r:.80}"


def _flat_model(
    fragments: Sequence[Sequence[Slot]],
    outer: Outer | None,
    chosen: ChosenOptimizer | None,
    buffers: Callable[[], list[torch.Tensor]],
    state: ElementState | None,
    frozen: Sequence[torch.Tensor],
) -> FlatModel:
    params = [[slot.param for slot in part] for part in fragments]
    copies = extra = 0
    if outer is not None:
        each = [param for part in params for param in part]
        narrow = is_narrow(each, buffer_dtype([*each, *buffers(), *frozen]))
        kept = int(outer.momentum > 0) if chosen is None else chosen.copies
        # The shared model, the outer optimizer's state, and the model that steps start from.
        copies, extra = 1 + kept + narrow, 0 if chosen is None else chosen.extra
    model = FlatModel(params, buffers, copies, state, frozen, extra)
    if chosen is not None:
        chosen.bind(model)
    return model


def _chosen_optimizer(
    fragments: Sequence[Sequence[Slot]], outer: Outer | None, others: Sequence[torch.Tensor]
) -> ChosenOptimizer | None:
    """Return the user's outer optimizer, if there is one."""
    if outer is None or outer.optimizer is None:
        return None
    params = [[slot.param for slot in part] for part in fragments]
    dtype = buffer_dtype([*(param for part in params for param in part), *others])
    sizes = [sum(local(param).numel() for param in part) for part in params]
    return ChosenOptimizer(outer.optimizer, sizes, dtype)


def _check_alike(training: Training, chosen: ChosenOptimizer | None) -> None:
    """Raise a `MismatchError` if workers have other outer optimizers, which differ by no name."""
    if chosen is None:
        return
    own = chosen.describe()
    if differs := _find_other(training, "outer optimizer", own):
        me, rank, theirs = differs
        raise MismatchError(
            f"rank {rank}'s outer optimizer is {theirs!r:.200}, rank {me}'s {own!r:.200}: "
            "DiLoCo(outer_optimizer=...) must make equal optimizers on all ranks"
        )


def _floating(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that have a mean, unlike integer counters."""
    return [tensor for tensor in tensors if tensor.is_floating_point()]


def _model_compression(
    wire: str | Coded,
    slots: Sequence[Slot],
    compression: Compression,
    trained: int,
    *,
    rounds_models: bool,
) -> ModelCompression:
    """Return how a flat model with the parameters of ``slots`` is compressed."""
    options = options_of(wire)
    if not options.encodes:
        dtype = wire_dtype(options.dtype)
        if dtype is torch.bfloat16 and rounds_models:
            coding = Coding([Region(Span(0, trained), Bf16Codec())])
            return ModelCompression(coding, torch.zeros(trained, device="cpu"), models=True)
        return ModelCompression(dtype=dtype)
    shapes = [(slot.name, slot.shape) for slot in slots]
    coding = Coding(list(regions(options, shapes, dense=compression.dense)))
    residual = None
    if compression.residuals is not None:
        numels = [slot.shape.numel() for slot in slots]
        names = [slot.name for slot in slots]
        residual = compression.residuals.flat_for(names, numels, sum(numels), torch.device("cpu"))
    return ModelCompression(coding, residual, gathers=options.gathers)


def group_averager(
    groups: Groups, world: World, model: FlatModel, compression: ModelCompression
) -> GroupAverager:
    """Make the averager of groups; a `UsageError` for a quorum of more workers than there are."""
    if groups.quorum is not None and groups.quorum > world.size:
        raise UsageError(
            f"quorum={groups.quorum}: there are {world.size} workers; allowed are 1 to {world.size}"
        )
    # Groups are opened in the world of all workers.
    session = GroupSession(
        world.parent or world, model.flat, groups.rules, compression=compression, seed=groups.seed,
        encrypted=groups.encrypted,
    )  # fmt: skip
    return GroupAverager(session, model.flat, world)


def pair_averager(
    pairs: Pairs, world: World, model: FlatModel, compression: ModelCompression
) -> PairAverager:
    """Make the averager of pairs."""
    return PairAverager(
        world, model.flat[: len(model.trained)], whole=model.flat, dtype=compression.dtype,
        seed=pairs.seed, encrypted=pairs.encrypted,
    )  # fmt: skip
