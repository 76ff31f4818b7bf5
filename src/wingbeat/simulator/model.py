"""The simulated model: layers with times, and buckets of their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from wingbeat.planning import plans
from wingbeat.planning.plans import Measured
from wingbeat.types import Fusion, LayerPositions, Plan, TensorSpec

ITEMSIZE = 4
"""Bytes of an element of a gradient."""


@dataclass(frozen=True, slots=True)
class TimedLayer:
    """One layer.

    Attributes:
        forward_s: seconds of its forward for a batch.
        backward_s: seconds of its backward for a batch.
        tensors: indices of its parameters.
        fully_connected: whether training classifies it as a fully connected layer.
    """

    forward_s: float
    backward_s: float
    tensors: tuple[int, ...]
    fully_connected: bool = False


@dataclass(frozen=True, slots=True)
class Model:
    """Layers in the order of forward, and all their parameters.

    Backward visits the layers, and each layer's tensors, from the last to the first. A layer's
    backward time is divided among its tensors by size, as in paced models.
    """

    layers: tuple[TimedLayer, ...]
    tensors: tuple[TensorSpec, ...]

    @property
    def measured(self) -> Measured:
        """Measurements that training would make: ready times, without distributions."""
        ready, now = [0.0] * len(self.tensors), 0.0
        for layer in reversed(self.layers):
            numel = sum(self.tensors[t].numel for t in layer.tensors)
            for t in reversed(layer.tensors):
                now += layer.backward_s * self.tensors[t].numel / numel
                ready[t] = now
            if not layer.tensors:
                now += layer.backward_s
        first = min(ready, default=0.0)
        return Measured(tuple(each - first for each in ready), (None,) * len(ready))

    @property
    def ready_order(self) -> list[int]:
        """The tensors, first ready first."""
        return [t for layer in reversed(self.layers) for t in reversed(layer.tensors)]


@dataclass(frozen=True, slots=True)
class Buckets:
    """A plan's buckets, by number, first ready first.

    ``of`` is the bucket of each tensor, and ``forward`` has the buckets, first needed first.
    ``members`` and ``numel`` count tensors and elements by bucket, without padding and flags.
    ``places`` has the positions among the layers, first needed first. ``parameters`` has the names
    and shapes of each bucket.
    """

    of: tuple[int, ...]
    members: tuple[int, ...]
    numel: tuple[int, ...]
    forward: tuple[int, ...]
    fully_connected: tuple[bool, ...]
    places: LayerPositions
    parameters: tuple[tuple[tuple[str, tuple[int, ...]], ...], ...] = ()


def buckets_of(model: Model, fusion: Fusion) -> Buckets:
    """Return the buckets that training would make by this rule."""
    return planned_buckets(model, plans.make_plan(fusion, model.tensors, model.ready_order))


def planned_buckets(model: Model, plan: Plan) -> Buckets:
    """Return the buckets of a plan."""
    order = model.ready_order
    of = [0] * len(model.tensors)
    for number, bucket in enumerate(plan.buckets):
        for tensor in bucket.tensors:
            of[tensor] = number
    place = {tensor: position for position, tensor in enumerate(reversed(order))}
    connected = {t for layer in model.layers if layer.fully_connected for t in layer.tensors}
    forward = sorted(
        range(len(plan.buckets)), key=lambda b: min(place[t] for t in plan.buckets[b].tensors)
    )
    having = [layer.tensors for layer in model.layers if layer.tensors]
    layer_of = {t: count for count, tensors in enumerate(having, 1) for t in tensors}
    return Buckets(
        tuple(of),
        tuple(len(bucket.tensors) for bucket in plan.buckets),
        tuple(_numel(model, bucket.tensors) for bucket in plan.buckets),
        tuple(forward),
        tuple(connected.issuperset(bucket.tensors) for bucket in plan.buckets),
        LayerPositions(
            tuple(min(layer_of[t] for t in plan.buckets[b].tensors) for b in forward), len(having)
        ),
        tuple(
            tuple((model.tensors[t].name, model.tensors[t].shape) for t in bucket.tensors)
            for bucket in plan.buckets
        ),
    )


def shard_of(model: Model, processes: int) -> Model:
    """Return what a process has of a model that FSDP2 divides: rows of each parameter."""
    if processes == 1:
        return model
    shards = (
        replace(tensor, shape=(-(-tensor.shape[0] // processes), *tensor.shape[1:]))
        if tensor.shape
        else tensor
        for tensor in model.tensors
    )
    return replace(model, tensors=tuple(shards))


def layers_of(model: Model) -> Buckets:
    """Return a bucket for each layer, also for those without parameters."""
    numbers = range(len(model.layers))
    of = {t: number for number in numbers for t in model.layers[number].tensors}
    return Buckets(
        tuple(of[t] for t in sorted(of)),
        tuple(len(layer.tensors) for layer in model.layers),
        tuple(_numel(model, layer.tensors) for layer in model.layers),
        tuple(numbers),
        (False,) * len(numbers),
        LayerPositions(tuple(numbers), len(numbers)),
    )


def _numel(model: Model, tensors: Sequence[int]) -> int:
    return sum(model.tensors[t].numel for t in tensors)
