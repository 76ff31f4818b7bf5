"""Paced models in virtual time."""

from __future__ import annotations

from wingbeat.simulator import Model, TimedLayer
from wingbeat.types import TensorSpec
from wingbeat_lab.paced.profile import FLOAT32_BYTES, Profile

_MATRIX = 2


def simulator_model(profile: Profile, time_scale: float = 1.0) -> Model:
    """Return the simulator's model of ``PacedModel(profile, time_scale=time_scale)``."""
    tensors: list[TensorSpec] = []
    layers = []
    for layer in profile.layers:
        first = len(tensors)
        # As in `engine.gradients.bucketing`: the parameter with most dimensions decides.
        connected = max((len(p.shape) for p in layer.parameters), default=0) == _MATRIX
        kind = "fc" if connected else ""
        tensors += [
            TensorSpec(f"{layer.name}.{p.name}", p.shape, "float32", FLOAT32_BYTES, layer=kind)
            for p in layer.parameters
        ]
        numbers = tuple(range(first, len(tensors)))
        forward_s = time_scale * (layer.forward_ms / 1e3)
        backward_s = time_scale * (layer.backward_ms / 1e3)
        layers.append(TimedLayer(forward_s, backward_s, numbers, connected))
    return Model(tuple(layers), tuple(tensors))
