"""The parts of strategies that average models (Ripples, AD-PSGD, local SGD, DiLoCo)."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from wingbeat import plans, schedules
from wingbeat.codecs import Coding
from wingbeat.codecs.bf16 import Bf16Codec
from wingbeat.codecs.coding import Region
from wingbeat.codecs.regions import regions
from wingbeat.collectives import wire_dtype
from wingbeat.engine.gradients.bucket import Slot
from wingbeat.engine.gradients.compression import Compression
from wingbeat.engine.gradients.views import ShownGradients
from wingbeat.engine.hooks import WeakCall
from wingbeat.engine.live import LiveState
from wingbeat.engine.runtime import IntentExchange, Runtime
from wingbeat.engine.updates.flat import ElementState, FlatModel, buffer_dtype, is_narrow
from wingbeat.engine.updates.local import Averager, LocalUpdate
from wingbeat.engine.updates.update import Training
from wingbeat.errors import MismatchError, UsageError
from wingbeat.exchanges.grouping import Grouping
from wingbeat.exchanges.groups import GroupAverager
from wingbeat.exchanges.lossy import Lossy
from wingbeat.exchanges.models import ModelExchange
from wingbeat.exchanges.pairs import PairAverager
from wingbeat.groups.rules import rules_of
from wingbeat.observe.log import log
from wingbeat.transport.world import World
from wingbeat.types import Averaging, Fusion, Span
from wingbeat.updates.outer import OuterUpdate, copies_of
from wingbeat.wires import Coded, TopK


def runtime_of(
    averaging: Averaging,
    wire: str | Coded,
    training: Training,
    compression: Compression,
    buffers: Callable[[], list[torch.Tensor]],
) -> Runtime:
    """Make them.

    Args:
        averaging: how models are averaged.
        wire: name of the dtype that they travel in, empty for float32 (or float64); or the codec
            through which differences do.
        training: what the parts work on.
        compression: keeps what the codec loses.
        buffers: returns the model's, as they are today.

    Raises:
        UsageError: a model, or an optimizer's state, that cannot be averaged so, or the generator
            cannot be started.
        MismatchError: workers' optimizers remember other things, where that is averaged.
        RendezvousError: a worker did not come.
    """
    bucketing, world = training.bucketing, training.collectives.world
    _check(training, world, averaging)
    fragments = _fragments(training, bucketing.fusion)
    slots = [slot for part in fragments for slot in part]
    state = _state_of(training, slots) if averaging.state else None
    frozen = _floating([param for _, param in bucketing.frozen])
    model = _flat(fragments, averaging, lambda: _floating(buffers()), state, frozen)
    wires = _lossy(wire, slots, compression, averaging, len(model.trained))
    averager = _averager_of(averaging, wires, world, model)
    schedule = schedules.Local(averaging.every, averaging.delay, len(fragments))
    update = _update_of(averaging, training, model, averager, schedule, slots)
    if averaging.in_groups:
        _in_groups[world.parent or world] = weakref.ref(update)
    runtime = Runtime(
        schedule,
        ModelExchange(averager.sections),
        bucketing,
        ShownGradients(bucketing),
        update,
        IntentExchange(training.collectives, len(bucketing.slots)),
        training.steps,
    )
    update.waited = WeakCall(runtime.waited)
    if isinstance(averager, GroupAverager):  # pairs leave by themselves
        _leaves_with(update, averager, world)
        lives = LiveState(training, update)
        averager.grouping.offer = lives.written
        # Who shares one model with all takes part from the moment that it has it.
        alike = averaging.outer is not None and averaging.partners == "all"
        if alike and isinstance(update, OuterUpdate):
            averager.grouping.renew()
        update.renew = functools.partial(_renew, averager.grouping, lives, join=alike)
        if world.returned:
            lives.put(averager.grouping.fetch(join=alike))
    return runtime


def check(model: torch.nn.Module, averaging: Averaging | None) -> None:
    """Raise a `UsageError` for a module that cannot be in a model that is averaged so."""
    if averaging is None or averaging.partners == "all":
        return
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.SyncBatchNorm):
            raise UsageError(
                f"{name!r} is a torch.nn.SyncBatchNorm, which waits for all workers in each "
                "forward, while others may wait in groups of some (Ripples, ADPSGD); use "
                "torch.nn.BatchNorm, or LocalSGD()"
            )


_in_groups: Any = weakref.WeakKeyDictionary()
"""By world of all workers: a reference to the update of the model averaged in groups of some."""


def _renew(grouping: Grouping, lives: LiveState, *, join: bool) -> None:
    """Take over another worker's state, if the others have gone on without this one."""
    if grouping.left_out:
        log.warning("others went on without this worker, which took too long: it takes their model")
        lives.put(grouping.fetch(join=join))


def _leaves_with(update: LocalUpdate, averager: GroupAverager, world: World) -> None:
    """Have the averager closed with the world, or when the model is forgotten."""
    world.on_close(averager.close)
    # Where the garbage is collected nobody can wait for others.
    ending = threading.Thread(target=averager.close, name="wingbeat-ending", daemon=True)
    weakref.finalize(update, ending.start).atexit = False


def _check(training: Training, world: World, averaging: Averaging) -> None:
    """Raise a `UsageError` for what cannot be averaged on this machine, or not now."""
    other = _in_groups.get(world.parent or world, lambda: None)()
    if averaging.in_groups and other is not None and not other.left:
        raise UsageError(
            "models are averaged in groups (Ripples) one model at a time: workers would wait for "
            "each other in groups of different models; distribute one module that contains both, "
            "call wingbeat.release() on the first, or use LocalSGD()"
        )
    device = training.bucketing.device
    if device.type != "cpu" or device.type in world.native_on:
        raise UsageError(
            f"parameters on {device}: models are averaged on the CPU only (Ripples, ADPSGD, "
            "LocalSGD, DiLoCo); keep the model on the CPU, or use wingbeat.DeAR()"
        )


def _update_of(
    averaging: Averaging,
    training: Training,
    model: FlatModel,
    averager: Averager,
    schedule: schedules.Local,
    slots: Sequence[Slot],
) -> LocalUpdate:
    if averaging.outer is None:
        return LocalUpdate(training, model, averager, schedule)
    lr, momentum = averaging.outer
    return OuterUpdate(
        training,
        model,
        averager,
        schedule,
        [slot.name for slot in slots],
        lr=lr,
        momentum=momentum,
        alike=averaging.partners == "all",
    )


def _fragments(training: Training, fusion: Fusion) -> list[list[Slot]]:
    """Return which parameters are averaged at the same time; first those that forward reads."""
    bucketing = training.bucketing
    plan = plans.make(fusion, bucketing.specs, bucketing.ready_order)
    return [
        [bucketing.slots[index] for index in sorted(bucket.tensors)]
        for bucket in reversed(plan.buckets)
    ]


def _state_of(training: Training, slots: Sequence[Slot]) -> ElementState:
    """Return what of the optimizer's state is averaged: on all workers the same."""
    state = ElementState(training.optimizer, {slot.param: slot.name for slot in slots})
    world, mine = training.collectives.world, state.described()
    if not world.returned:
        world.publish("averaged state", mine)
    for rank in range(world.size):
        theirs = world.read("averaged state", rank)
        if theirs != mine:
            raise MismatchError(
                f"rank {world.rank}'s optimizer remembers {_shown(mine, theirs)}, rank {rank}'s "
                f"{_shown(theirs, mine)}: with average_state=True all ranks must build the same"
            )
    return state


def _shown(mine: Any, theirs: Any) -> str:
    """Say where the one is first another than the other, as `ElementState.described` has it."""
    try:
        name, kept = next(each for each in mine if each not in theirs)
        return f"{kept[:80] or 'nothing'} of {name!r:.80}"
    except (TypeError, ValueError, StopIteration):
        return f"{mine!r:.80}"


def _flat(
    fragments: Sequence[Sequence[Slot]],
    averaging: Averaging,
    buffers: Callable[[], list[torch.Tensor]],
    state: ElementState | None,
    frozen: Sequence[torch.Tensor],
) -> FlatModel:
    params = [[slot.param for slot in part] for part in fragments]
    copies = 0
    if averaging.outer is not None:
        each = [param for part in params for param in part]
        narrow = is_narrow(each, buffer_dtype([*each, *buffers(), *frozen]))
        copies = copies_of(averaging.outer[1], narrow=narrow)
    return FlatModel(params, buffers, copies, state, frozen)


def _floating(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return those that have a mean; how many batches there were, say, has none."""
    return [tensor for tensor in tensors if tensor.is_floating_point()]


def _lossy(
    wire: str | Coded,
    slots: Sequence[Slot],
    compression: Compression,
    averaging: Averaging,
    trained: int,
) -> Lossy:
    """Return what parts of a flat model with the parameters of ``slots`` travel as.

    Models that are rounded keep what that takes, as most steps are less than it; pairs and an outer
    optimizer round differences.
    """
    if isinstance(wire, str):
        dtype = wire_dtype(wire)
        if dtype is torch.bfloat16 and averaging.partners != "pairs" and averaging.outer is None:
            coding = Coding([Region(Span(0, trained), Bf16Codec())])
            return Lossy(coding, torch.zeros(trained, device="cpu"), models=True)
        return Lossy(dtype)
    coding = Coding(list(regions(wire, [(slot.name, slot.param.shape) for slot in slots])))
    owed = None
    if compression.residuals is not None:
        numels = [slot.param.numel() for slot in slots]
        names = [slot.name for slot in slots]
        owed = compression.residuals.flat_for(names, numels, sum(numels), torch.device("cpu"))
    return Lossy(coding, owed, gathers=isinstance(wire, TopK))


def _averager_of(
    averaging: Averaging, wire: Lossy, world: World, model: FlatModel
) -> GroupAverager | PairAverager:
    seed, encrypted = averaging.seed, averaging.encrypted
    if averaging.partners == "pairs":
        params = model.flat[: len(model.trained)]
        return PairAverager(
            world, params, whole=model.flat, wire=wire.dtype, seed=seed, encrypted=encrypted
        )
    static = averaging.partners == "static"
    rules = None if static else rules_of(averaging.partners, averaging.size, averaging.threshold)
    # Groups are opened in the world of all.
    grouping = Grouping(
        world.parent or world, model.flat, rules, wire=wire, seed=seed, encrypted=encrypted
    )
    return GroupAverager(grouping, model.flat, world)
