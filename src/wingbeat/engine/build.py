"""Builds the parts of an engine from a strategy's choices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from wingbeat import schedules
from wingbeat.collectives import Collectives
from wingbeat.engine.gradients.bucket import Slot
from wingbeat.engine.gradients.compression import Compression
from wingbeat.engine.gradients.unsent import UnsentGradients
from wingbeat.engine.gradients.views import (
    Gatherer,
    HiddenGradients,
    MixedGradients,
    SentGradients,
    ShownGradients,
)
from wingbeat.engine.hooks import WeakCall
from wingbeat.engine.runtime import IntentExchange, Runtime
from wingbeat.engine.updates.divided import ShardedUpdate, check_divisible
from wingbeat.engine.updates.shards import TensorShards
from wingbeat.engine.updates.update import (
    DeferredUpdate,
    SingleWorkerUpdate,
    Training,
    Update,
    WholeUpdate,
)
from wingbeat.errors import UsageError
from wingbeat.exchanges.collective import CollectiveExchange, Exchange
from wingbeat.exchanges.partial import PartialExchange
from wingbeat.methods.bounded_staleness.colayers import LayerProfiler
from wingbeat.methods.bounded_staleness.exchange import (
    BoundedStalenessExchange,
    BoundedUpdate,
    SynchronousUpdate,
)
from wingbeat.methods.model_averaging.build import build_runtime
from wingbeat.methods.parameter_server.coding import FLOAT32
from wingbeat.methods.parameter_server.exchange import GpuServerExchange, ServerExchange
from wingbeat.methods.parameter_server.server_update import OPTION, ServerUpdate, describe_optimizer
from wingbeat.schedules.events import Operation, Schedule
from wingbeat.types import Choices


def make_compression(
    choices: Choices, slots: Sequence[Slot], collectives: Collectives
) -> Compression:
    """Make the compression of gradients; raise a `UsageError` if it is not possible."""
    if choices.averaging is not None:  # model differences are compressed, not gradients
        wire = "" if isinstance(choices.wire, str) or collectives.world.size == 1 else choices.wire
        return Compression(wire, slots, collectives)
    if choices.partitions is not None and collectives.world.size > 1:
        return UnsentGradients(choices.wire, slots, collectives)
    sums = choices.servers is None and choices.staleness is None
    return Compression(choices.wire, slots, collectives, sums=sums)


def make_runtime(
    choices: Choices,
    training: Training,
    compression: Compression,
    gatherer: Gatherer,
    buffers: Callable[[], list[torch.Tensor]],
) -> Runtime:
    """Make the parts that ``choices`` select."""
    averaging = choices.averaging
    if averaging is not None and training.collectives.world.size > 1:
        return build_runtime(averaging, choices.wire, training, compression, buffers)
    schedule = _make_schedule(choices, training.collectives.world.size)
    views = _make_views(schedule, training, compression, gatherer)
    # Before the exchange, which may start servers: this refuses optimizers that cannot be updated
    # in parts.
    if choices.server_updates and training.collectives.world.size > 1:
        exchange, update = _make_server_updates(choices, training, schedule, views)
    elif choices.staleness is not None and training.collectives.world.size > 1:
        exchange, update = _make_bounded(choices, training, views, compression)
    else:
        update = _make_update(choices, training, schedule, views, compression)
        exchange = _make_exchange(choices, training, compression)
    runtime = Runtime(
        schedule,
        exchange,
        training.bucketing,
        views,
        update,
        IntentExchange(training.collectives, len(training.bucketing.slots)),
        training.steps,
    )
    if isinstance(exchange, BoundedStalenessExchange) and isinstance(views, SentGradients):
        exchange.waited = WeakCall(runtime.waited)
    return runtime


def make_bundling(
    choices: Choices, runtime: Runtime, rebucket: Callable[[], object]
) -> LayerProfiler | None:
    """Make the measurements for colayers; None where colayers are fixed during training."""
    if not choices.fusion.measured or not isinstance(runtime.exchange, BoundedStalenessExchange):
        return None
    bundling = LayerProfiler(runtime.bucketing, rebucket)
    runtime.exchange.set_profiler(bundling)
    return bundling


def _make_schedule(choices: Choices, workers: int) -> Schedule:
    if workers == 1:
        return schedules.Wfbp()  # no exchange
    if choices.staleness is not None and choices.staleness.synchronous:
        return schedules.Wfbp(Operation.CONTRIBUTE)
    name = "sharded" if choices.shard_optimizer else choices.schedule
    if choices.server_updates:
        name = name.replace("served", "served_updates")
    return schedules.BY_NAME[name]()


def _make_views(
    schedule: Schedule, training: Training, compression: Compression, gatherer: Gatherer
) -> ShownGradients:
    bucketing = training.bucketing
    if isinstance(schedule, schedules.Stale):
        return SentGradients(bucketing)
    if not schedule.whole_after_backward:
        return HiddenGradients(bucketing, gatherer)
    if isinstance(compression, UnsentGradients):
        return MixedGradients(bucketing, training.stepper.owns)
    return ShownGradients(bucketing)


def _make_bounded(
    choices: Choices, training: Training, views: ShownGradients, compression: Compression
) -> tuple[Exchange, Update]:
    assert choices.staleness is not None, "the strategy's parts have been checked"
    if isinstance(views, SentGradients):
        _refuse_other_optimizers(training)
    exchange = BoundedStalenessExchange(
        training.collectives.world,
        choices.staleness,
        compression,
        training.optimizer,
        training.stepper.whole_step,
        training.steps,
        training.bucketing.others,
    )
    if isinstance(views, SentGradients):
        return exchange, BoundedUpdate(training, views, exchange)
    return exchange, SynchronousUpdate(training, exchange)


def _refuse_other_optimizers(training: Training) -> None:
    """Raise a `UsageError` unless the optimizer has exactly the parameters in the buckets."""
    stepper, slots = training.stepper, training.bucketing.slots
    slot = next((slot for slot in slots if not stepper.owns(slot.param)), None)
    if slot is not None:
        raise UsageError(
            f"parameter {slot.name!r} is not the optimizer's: under bounded staleness (Canary) one "
            "optimizer updates all parameters that need a gradient; give them all to it, or "
            "freeze the others"
        )
    known = training.bucketing.slot_of
    local = sum(param.requires_grad and param not in known for param in stepper.params())
    if local:
        raise UsageError(
            f"{local} parameters of the optimizer are not synchronised: under bounded staleness "
            "(Canary) it steps when sums come, which has nothing to do with their gradients; give "
            "them an optimizer of their own"
        )


def _make_server_updates(
    choices: Choices, training: Training, schedule: Schedule, views: ShownGradients
) -> tuple[Exchange, Update]:
    assert choices.servers is not None, "the strategy's parts have been checked"
    device = training.bucketing.device
    if device.type != "cpu" or device.type in training.collectives.world.nccl_devices:
        raise UsageError(
            f"{OPTION} with parameters on {device}: servers update on the CPU only; use "
            'update="worker", or keep the model on the CPU'
        )
    description = describe_optimizer(training.optimizer, training.stepper.snapshot())
    specs = training.bucketing.specs
    numel, nbytes = sum(s.numel for s in specs), sum(s.nbytes for s in specs)
    check_divisible(training)
    exchange = ServerExchange(
        training.collectives.world,
        # The servers keep sums, and encoding them would lose precision without saving traffic.
        dataclasses.replace(choices.servers, dense=True),
        _gradient_bytes(choices, training),
        choices.wire,
        optimizer=description.text,
        max_update_bytes=description.max_nbytes(numel, nbytes),
    )
    remote = exchange.remote
    return exchange, ServerUpdate(training, schedule, views, remote, description.elementwise)


def _make_exchange(choices: Choices, training: Training, compression: Compression) -> Exchange:
    collectives = training.collectives
    if isinstance(compression, UnsentGradients):
        if isinstance(training.optimizer, torch.optim.LBFGS):
            raise UsageError(
                "torch.optim.LBFGS with gradients that are exchanged in parts (Partial, Ako) is "
                "not possible: how often it evaluates the loss depends on gradients, which differ "
                "between workers; use wingbeat.AllReduce()"
            )
        return PartialExchange(collectives, compression, choices.partitions or 0)
    if choices.servers is None or collectives.world.size == 1:
        return CollectiveExchange(collectives, compression)
    if training.bucketing.device.type in collectives.world.nccl_devices:
        return GpuServerExchange(collectives.world, choices.servers, choices.wire)
    nbytes = _gradient_bytes(choices, training)
    exchange = ServerExchange(collectives.world, choices.servers, nbytes, choices.wire)
    compression.collect = exchange.collect
    return exchange


def _gradient_bytes(choices: Choices, training: Training) -> int:
    # With an encoding, sums are float32, whatever the gradients' dtype.
    least = FLOAT32 if choices.wire else 1
    return sum(spec.numel * max(spec.itemsize, least) for spec in training.bucketing.specs)


def _make_update(
    choices: Choices,
    training: Training,
    schedule: Schedule,
    views: ShownGradients,
    compression: Compression,
) -> Update:
    if training.collectives.world.size == 1:
        return SingleWorkerUpdate(training, compression)
    if choices.shard_optimizer:
        update = ShardedUpdate(training, schedule, views)
        on_gpu = training.bucketing.device.type in training.collectives.world.nccl_devices
        if on_gpu and compression.coded is not None and isinstance(update.shards, TensorShards):
            raise UsageError(
                f"DeAR(shard_optimizer=True): optimizer {type(training.optimizer).__name__} is "
                "divided by whole parameters, and codecs on GPUs have equal blocks; use "
                'compression="fp32" or "bf16", or leave shard_optimizer out'
            )
        return update
    if schedule.whole_after_backward:
        return WholeUpdate(training)
    return DeferredUpdate(training)
