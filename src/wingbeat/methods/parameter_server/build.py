"""Builds the runtime of parameter servers."""

from __future__ import annotations

import dataclasses

from wingbeat.engine.context import BuildContext
from wingbeat.engine.runtime import Runtime
from wingbeat.engine.updates.divided import check_divisible
from wingbeat.exchanges.collective import Exchange
from wingbeat.methods.parameter_server.coding import FLOAT32
from wingbeat.methods.parameter_server.exchange import GpuServerExchange, ServerExchange
from wingbeat.methods.parameter_server.options import Servers
from wingbeat.methods.parameter_server.server_update import ServerUpdate, describe_optimizer


def build_runtime(servers: Servers, context: BuildContext) -> Runtime:
    """Make a runtime with servers that sum, and apply the optimizer if its update is theirs."""
    if context.strategy.update_part.on_servers:
        return _with_server_updates(servers, context)
    return context.runtime(lambda: _exchange(servers, context))


def _exchange(servers: Servers, context: BuildContext) -> Exchange:
    wire = context.strategy.wire
    if context.on_gpu and GpuServerExchange.fits(servers, wire):
        return GpuServerExchange(context.world, servers)
    exchange = ServerExchange(context.world, servers, _gradient_bytes(context), wire)
    context.compression.collect, context.compression.on_host = exchange.collect, True
    return exchange


def _with_server_updates(servers: Servers, context: BuildContext) -> Runtime:
    training = context.training
    schedule = context.schedule()
    views = context.views(schedule)
    # Before servers start: this refuses optimizers that cannot be updated in parts.
    description = describe_optimizer(training.optimizer, training.stepper.snapshot())
    specs = training.bucketing.specs
    numel, nbytes = sum(s.numel for s in specs), sum(s.nbytes for s in specs)
    check_divisible(training)
    exchange = ServerExchange(
        context.world,
        # The servers keep sums, and encoding them would lose precision without saving traffic.
        dataclasses.replace(servers, back="dense"),
        _gradient_bytes(context),
        context.strategy.wire,
        optimizer=description.text,
        max_update_bytes=description.max_nbytes(numel, nbytes),
    )
    context.compression.on_host = True
    remote = exchange.remote
    update = ServerUpdate(training, schedule, views, remote, description.elementwise)
    return context.assemble(schedule, exchange, views, update)


def _gradient_bytes(context: BuildContext) -> int:
    # With an encoding, sums are float32, whatever the gradients' dtype.
    least = FLOAT32 if context.strategy.wire else 1
    specs = context.training.bucketing.specs
    return sum(spec.numel * max(spec.itemsize, least) for spec in specs)
