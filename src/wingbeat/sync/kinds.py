"""From a strategy's choices to the parts that make it."""

from __future__ import annotations

from wingbeat import schedules
from wingbeat.errors import UsageError
from wingbeat.exchanges.collective import CollectiveExchange
from wingbeat.exchanges.exchange import Exchange
from wingbeat.exchanges.gpus import GpuServers
from wingbeat.exchanges.servers import FLOAT32, ServerExchange
from wingbeat.gradients.compression import Compression
from wingbeat.gradients.pending import Gatherer
from wingbeat.gradients.views import HiddenGradients, ShownGradients, Views
from wingbeat.schedules.events import Schedule
from wingbeat.sync.runtime import Runtime
from wingbeat.types import Choices
from wingbeat.updates.agreement import Agreement
from wingbeat.updates.alone import AloneUpdate
from wingbeat.updates.deferred import DeferredUpdate
from wingbeat.updates.described import OPTION, describe
from wingbeat.updates.divided import check_divisible
from wingbeat.updates.served import ServedUpdate
from wingbeat.updates.sharded import ShardedUpdate
from wingbeat.updates.update import Training, Update
from wingbeat.updates.whole import WholeUpdate


def runtime_of(
    choices: Choices, training: Training, compression: Compression, gatherer: Gatherer
) -> Runtime:
    """Make the parts that ``choices`` ask for.

    Raises:
        UsageError: it is not possible with this optimizer.
        MismatchError: the workers' optimizers differ, and the strategy divides them.
    """
    schedule = _schedule_of(choices, training.collectives.world.size)
    views: Views = ShownGradients(training.bucketing)
    if not schedule.whole_after_backward:
        views = HiddenGradients(training.bucketing, gatherer)
    # Before the exchange, which may start servers: it refuses what cannot be updated in parts.
    if choices.server_updates and training.collectives.world.size > 1:
        exchange, update = _on_servers(choices, training, schedule, views)
    else:
        update = _update_of(choices, training, schedule, views, compression)
        exchange = _exchange_of(choices, training, compression)
    return Runtime(
        schedule,
        exchange,
        training.bucketing,
        views,
        update,
        Agreement(training.collectives, len(training.bucketing.slots)),
        training.steps,
    )


def _on_servers(
    choices: Choices, training: Training, schedule: Schedule, views: Views
) -> tuple[Exchange, Update]:
    """Make servers that update, and what speaks with them.

    Raises:
        UsageError: parameters are not on the CPU, or servers cannot run this optimizer.
        MismatchError: the workers' optimizers differ.
    """
    assert choices.servers is not None, "a strategy's parts have been checked"
    device = training.bucketing.device
    if device.type != "cpu" or device.type in training.collectives.world.native_on:
        raise UsageError(
            f"{OPTION} with parameters on {device}: servers update on the CPU only; use "
            'update="worker", or keep the model on the CPU'
        )
    described = describe(training.optimizer, training.stepper.snapshot())
    specs = training.bucketing.specs
    nbytes = sum(spec.nbytes for spec in specs)
    room = described.room(sum(spec.numel for spec in specs), nbytes)
    check_divisible(training)
    exchange = ServerExchange(
        training.collectives.world,
        choices.servers,
        nbytes,
        optimizer=described.text,
        memory=room,
    )
    return exchange, ServedUpdate(training, schedule, views, exchange.remote, described.each)


def _exchange_of(choices: Choices, training: Training, compression: Compression) -> Exchange:
    collectives = training.collectives
    if choices.servers is None or collectives.world.size == 1:
        return CollectiveExchange(collectives, compression)
    if training.bucketing.device.type in collectives.world.native_on:
        return GpuServers(collectives.world, choices.servers, choices.wire)
    # With another wire sums are made, and sent if need be, in float32 whatever their own dtype.
    least = FLOAT32 if choices.wire else 1
    nbytes = sum(spec.numel * max(spec.itemsize, least) for spec in training.bucketing.specs)
    exchange = ServerExchange(collectives.world, choices.servers, nbytes, choices.wire)
    compression.collect = exchange.collect
    return exchange


def _schedule_of(choices: Choices, workers: int) -> Schedule:
    if workers == 1:
        return schedules.Wfbp()  # nothing is exchanged
    name = "sharded" if choices.shard_optimizer else choices.schedule
    if choices.server_updates:
        name = name.replace("served", "served_updates")
    return schedules.BY_NAME[name]()


def _update_of(
    choices: Choices,
    training: Training,
    schedule: Schedule,
    views: Views,
    compression: Compression,
) -> Update:
    if training.collectives.world.size == 1:
        return AloneUpdate(training, compression)
    if choices.shard_optimizer:
        return ShardedUpdate(training, schedule, views)
    if schedule.whole_after_backward:
        return WholeUpdate(training)
    return DeferredUpdate(training)
