"""Layers merged by the costs of simulated links and codecs, as training merges by measured ones.

Costs are those of single buckets, alone on the simulated cluster, from which training's own rules
make plans. Where a trial would compare several, whole iterations with each are simulated.
"""

from __future__ import annotations

from collections.abc import Callable

from wingbeat.compression import options_of
from wingbeat.parts.strategy import Strategy
from wingbeat.planning import merge
from wingbeat.planning.costs import CostModel, Workload, best_fit
from wingbeat.planning.measure import geometric, payload_bytes
from wingbeat.schedules.events import Operation
from wingbeat.simulator.agenda import Agenda
from wingbeat.simulator.exchange import SimulationContext
from wingbeat.simulator.model import Buckets, Model, planned_buckets
from wingbeat.types import LayerPositions, TensorSpec

SMALLEST = 1024
"""Elements of the smallest bucket whose costs are simulated."""

Prepare = Callable[[Agenda, Buckets], SimulationContext]
"""Makes a new cluster for some buckets."""


def merged_buckets(
    model: Model, strategy: Strategy, prepare: Prepare, seconds: Callable[[Buckets], float]
) -> Buckets:
    """Return the buckets of the strategy's rule; ``seconds`` simulates an iteration with some."""
    merging = strategy.plan.merging()
    assert merging is not None, "this plan is made by no costs"
    workload = _workload(model, strategy)
    found = merge.candidates(merging.rule, workload, _costs(model, strategy, prepare))
    planned = [planned_buckets(model, each.plan) for each in found]
    return planned[0] if len(planned) == 1 else min(planned, key=seconds)


def _workload(model: Model, strategy: Strategy) -> Workload:
    order, specs, ready_s = model.ready_order, model.tensors, model.measured.ready_s
    nbytes = payload_bytes(specs, strategy.wire)
    return Workload(
        tensors=tuple(order),
        ready_s=tuple(ready_s[t] for t in order),
        numels=tuple(specs[t].numel for t in order),
        nbytes=tuple(nbytes[t] for t in order),
        kinds=tuple(specs[t].kind for t in order),
    )


def _costs(model: Model, strategy: Strategy, prepare: Prepare) -> CostModel:
    encode, exchange, gather = [], [], []
    halves, wire = strategy.schedule.machine == "dear", strategy.wire
    total = max(2 * SMALLEST, sum(tensor.numel for tensor in model.tensors))
    for numel in geometric(SMALLEST, total):
        spec = TensorSpec("t", (numel,), "float32", 4)
        (nbytes,) = payload_bytes([spec], wire)
        first = Operation.REDUCE_SCATTER if halves else Operation.ALL_REDUCE
        encoded_s, exchanged_s = _alone(spec, first, prepare)
        encode.append((float(numel), encoded_s))
        exchange.append((nbytes, exchanged_s))
        if halves and not options_of(wire).summed:
            gather.append((nbytes, _alone(spec, Operation.ALL_GATHER, prepare)[1]))
    density = options_of(wire).fixed_density
    return CostModel(
        best_fit(encode, density=density).curve,
        best_fit(exchange).curve,
        gather=best_fit(gather).curve if gather else None,
    )


def _alone(spec: TensorSpec, operation: Operation, prepare: Prepare) -> tuple[float, float]:
    """Return the seconds to encode a bucket of one tensor, and to start and exchange it."""
    agenda = Agenda()
    parameters = (((spec.name, spec.shape),),)
    buckets = Buckets(
        (0,), (1,), (spec.numel,), (0,), (False,), LayerPositions((1,), 1), parameters
    )
    context = prepare(agenda, buckets)
    exchanges = context.collectives().workers
    ended = [0.0]
    for each in exchanges:
        each.start(operation, 0, chained=False)
        for part in each.under_way(0):
            part.when_over(lambda: ended.append(agenda.now))
    encoded_s = exchanges[0].before(operation, 0).seconds
    agenda.run()
    return encoded_s, context.work.start_s + max(ended) + exchanges[0].after(0).seconds
