"""What is trained, as a simulator sees it: layers with times, and buckets of their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wingbeat.methods.parameter_server.slicing import LayerPositions
from wingbeat.planning import plans
from wingbeat.planning.colayers import Measured
from wingbeat.types import Fusion, TensorSpec

ITEMSIZE = 4
"""Bytes of an element of a gradient."""


@dataclass(frozen=True, slots=True)
class TimedLayer:
    """One layer.

    Attributes:
        forward_s: its time for a batch, in seconds.
        backward_s: the same.
        tensors: its parameters, as numbers of tensors.
        fully_connected: whether it is a fully connected layer, as training judges that.
    """

    forward_s: float
    backward_s: float
    tensors: tuple[int, ...]
    fully_connected: bool = False


@dataclass(frozen=True, slots=True)
class Model:
    """Layers in the order of forward, and all their parameters.

    Backward goes through the layers and each layer's tensors from the last to the first; a
    layer's backward time is shared among its tensors by size, as paced models do.
    """

    layers: tuple[TimedLayer, ...]
    tensors: tuple[TensorSpec, ...]

    @property
    def measured(self) -> Measured:
        """What training would measure: when gradients are ready, after the first.

        How wide they are distributed is not known.
        """
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

    Attributes:
        of: each tensor's bucket.
        members: how many tensors a bucket has.
        numel: how many elements, padding and flags left out.
        forward: the buckets, first needed first.
        fully_connected: of each, whether it is of fully connected layers alone.
        places: where they lie among the layers, first needed first.
    """

    of: tuple[int, ...]
    members: tuple[int, ...]
    numel: tuple[int, ...]
    forward: tuple[int, ...]
    fully_connected: tuple[bool, ...]
    places: LayerPositions


def buckets_of(model: Model, fusion: Fusion) -> Buckets:
    """Return the buckets that training would make of the model by this rule."""
    order = model.ready_order
    plan = plans.make_plan(fusion, model.tensors, order)
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
    )


def _numel(model: Model, tensors: Sequence[int]) -> int:
    return sum(model.tensors[t].numel for t in tensors)
