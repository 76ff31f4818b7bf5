"""Builds the runtime of bounded staleness."""

from __future__ import annotations

import torch

from wingbeat import schedules
from wingbeat.engine.context import BuildContext
from wingbeat.engine.gradients.views import SentGradients, ShownGradients
from wingbeat.engine.hooks import WeakCall
from wingbeat.engine.runtime import Runtime
from wingbeat.engine.updates.trials import may_communicate
from wingbeat.engine.updates.update import Training
from wingbeat.engine.upgrade import engine_of
from wingbeat.errors import UsageError
from wingbeat.methods.bounded_staleness.colayers import LayerProfiler
from wingbeat.methods.bounded_staleness.exchange import (
    BoundedStalenessExchange,
    BoundedUpdate,
    SynchronousUpdate,
)
from wingbeat.methods.bounded_staleness.options import Bounded
from wingbeat.schedules.events import Operation


def build_runtime(bounded: Bounded, context: BuildContext) -> Runtime:
    """Make a runtime that sends pieces, and applies rounds of sums."""
    training = context.training
    if not bounded.exact:
        _refuse_other_optimizers(training)
        _refuse_communicating(training.optimizer)
    exchange = BoundedStalenessExchange(
        context.world,
        bounded,
        context.compression,
        training.optimizer,
        training.stepper.whole_step,
        training.steps,
        training.bucketing.others,
    )
    if bounded.exact:  # synchronous: a sum is in its bucket when backward returns
        return context.assemble(
            schedules.Wfbp(Operation.CONTRIBUTE),
            exchange,
            ShownGradients(training.bucketing),
            SynchronousUpdate(training, exchange),
        )
    views = SentGradients(training.bucketing)
    update = BoundedUpdate(training, views, exchange)
    runtime = context.assemble(schedules.Stale(), exchange, views, update)
    exchange.waited = WeakCall(runtime.waited)
    if context.strategy.plan.fusion().measured:
        runtime.profiler = LayerProfiler(training.bucketing, context.rebucket)
        exchange.set_profiler(runtime.profiler)
    return runtime


def bounded_exchange(model: torch.nn.Module) -> BoundedStalenessExchange | None:
    """Return the exchange of a model under bounded staleness; None under other strategies."""
    engine = engine_of(model)
    exchange = None if engine is None else engine.runtime.exchange
    return exchange if isinstance(exchange, BoundedStalenessExchange) else None


def _refuse_communicating(optimizer: torch.optim.Optimizer) -> None:
    """Raise a `UsageError` for an optimizer whose ranks of a replica must step together."""
    if may_communicate(optimizer):
        raise UsageError(
            f"optimizer {type(optimizer).__name__} may communicate to update a DTensor, and under "
            "bounded staleness (Canary) the ranks of a replica apply rounds at different times: "
            "use an optimizer of torch.optim that updates each element by itself, such as AdamW, "
            "or wingbeat.Canary(s=0)"
        )


def _refuse_other_optimizers(training: Training) -> None:
    """Raise a `UsageError` unless the optimizer has exactly the parameters in the buckets."""
    stepper, slots = training.stepper, training.bucketing.slots
    slot = next((slot for slot in slots if not slot.owned), None)
    if slot is not None:
        raise UsageError(
            f"parameter {slot.name!r} is not the optimizer's: under bounded staleness (Canary) one "
            "optimizer updates all parameters that need a gradient; give them all to it, or "
            "freeze the others"
        )
    known = training.bucketing.slot_of
    local = sum(param.requires_grad and id(param) not in known for param in stepper.params())
    if local:
        raise UsageError(
            f"{local} parameters of the optimizer are not synchronised: under bounded staleness "
            "(Canary) it steps when sums come, which has nothing to do with their gradients; give "
            "them an optimizer of their own"
        )
