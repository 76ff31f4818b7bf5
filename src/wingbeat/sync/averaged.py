"""The parts of strategies that average models (Ripples, AD-PSGD, local SGD, DiLoCo)."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from wingbeat import plans, schedules
from wingbeat.collectives import wire_dtype
from wingbeat.errors import UsageError
from wingbeat.exchanges.grouping import Grouping
from wingbeat.exchanges.groups import GroupAverager
from wingbeat.exchanges.models import ModelExchange
from wingbeat.exchanges.pairs import PairAverager
from wingbeat.gradients.views import ShownGradients
from wingbeat.groups.rules import rules_of
from wingbeat.sync.hooks import WeakCall
from wingbeat.sync.live import LiveState
from wingbeat.sync.runtime import Runtime
from wingbeat.transport.world import World
from wingbeat.types import Averaging, Fusion
from wingbeat.updates.agreement import Agreement
from wingbeat.updates.averager import Averager
from wingbeat.updates.flat import FlatModel
from wingbeat.updates.local import LocalUpdate
from wingbeat.updates.outer import OuterUpdate
from wingbeat.updates.update import Training


def runtime_of(
    averaging: Averaging,
    wire: object,
    training: Training,
    buffers: Callable[[], list[torch.Tensor]],
) -> Runtime:
    """Make them.

    Args:
        averaging: how models are averaged.
        wire: name of the dtype that they travel in; empty for float32 (or float64).
        training: what the parts work on.
        buffers: returns the model's, as they are today.

    Raises:
        UsageError: a model that cannot be averaged so, or the generator cannot be started.
        RendezvousError: a worker did not come.
    """
    bucketing, world = training.bucketing, training.collectives.world
    _check(training, world, averaging)
    model = FlatModel(_fragments(training, bucketing.fusion), lambda: _floating(buffers()))
    averager = _averager_of(averaging, str(wire), world, model.flat)
    schedule = schedules.Local(averaging.every, averaging.delay, len(model.spans))
    if averaging.outer is None:
        update = LocalUpdate(training, model, averager)
    else:
        update = OuterUpdate(training, model, averager, *averaging.outer)
    _leaves_with(update, averager, world)
    if averaging.partners not in ("all", "pairs"):
        _in_groups[world.parent or world] = weakref.ref(update)
    runtime = Runtime(
        schedule,
        ModelExchange(averager.sections),
        bucketing,
        ShownGradients(bucketing),
        update,
        Agreement(training.collectives, len(bucketing.slots)),
        training.steps,
    )
    update.waited = WeakCall(runtime.waited)
    if isinstance(averager, GroupAverager):
        lives = LiveState(training, schedule)
        averager.grouping.offer = lives.written
        if world.returned:
            lives.put(averager.grouping.fetch())
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


def _leaves_with(update: LocalUpdate, averager: Averager, world: World) -> None:
    """Have the averager closed with the world, or when the model is forgotten."""
    world.on_close(averager.close)
    # Where the garbage is collected nobody can wait for others.
    ending = threading.Thread(target=averager.close, name="wingbeat-ending", daemon=True)
    weakref.finalize(update, ending.start).atexit = False


def _check(training: Training, world: World, averaging: Averaging) -> None:
    """Raise a `UsageError` for what cannot be averaged on this machine, or not now."""
    other = _in_groups.get(world.parent or world, lambda: None)()
    if averaging.partners not in ("all", "pairs") and other is not None and not other.left:
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


def _fragments(training: Training, fusion: Fusion) -> list[list[torch.Tensor]]:
    """Return which parameters are averaged at the same time; first those that forward reads."""
    bucketing = training.bucketing
    plan = plans.make(fusion, bucketing.specs, bucketing.ready_order)
    return [
        [bucketing.slots[index].param for index in sorted(bucket.tensors)]
        for bucket in reversed(plan.buckets)
    ]


def _floating(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return those that have a mean; how many batches there were, say, has none."""
    return [tensor for tensor in tensors if tensor.is_floating_point()]


def _averager_of(averaging: Averaging, wire: str, world: World, flat: torch.Tensor) -> Averager:
    wire_as, seed, encrypted = wire_dtype(wire), averaging.seed, averaging.encrypted
    if averaging.partners == "pairs":
        return PairAverager(world, flat, wire=wire_as, seed=seed, encrypted=encrypted)
    static = averaging.partners == "static"
    rules = None if static else rules_of(averaging.partners, averaging.size, averaging.threshold)
    # Groups are opened in the world of all.
    grouping = Grouping(
        world.parent or world, flat, rules, wire=wire_as, seed=seed, encrypted=encrypted
    )
    return GroupAverager(grouping, flat, world)
