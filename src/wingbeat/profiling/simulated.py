"""A profile as the simulator's model."""

from __future__ import annotations

from wingbeat.profiling.profile import FLOAT32_BYTES, Profile
from wingbeat.simulator import Model, TimedLayer
from wingbeat.types import TensorSpec


def simulator_model(profile: Profile, time_scale: float = 1.0) -> Model:
    """Return the simulator's model of a profile, with its times multiplied by ``time_scale``."""
    tensors: list[TensorSpec] = []
    layers = []
    for layer in profile.layers:
        first = len(tensors)
        # As in `engine.gradients.bucketing`: the parameter with most dimensions decides.
        connected = max((len(p.shape) for p in layer.parameters), default=0) == 2
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
