"""What a layer costs, and how long a pass over layers takes at least when their bytes must travel.

The link is perfect (no latency, no header) and messages are fluid: cut anywhere, sent in the best
order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """One layer's compute time in seconds and the bytes that its gradients take on the wire."""

    forward_s: float
    backward_s: float
    nbytes: float


def backward_floor(layers: Sequence[LayerCosts], per_byte: float) -> float:
    """Time from the start of backward until the last gradient has arrived.

    One link, jobs with release times: the last busy stretch begins at some layer's release and
    holds everything released from then on, so the floor is the worst such stretch.
    """
    ready = 0.0
    left = sum(layer.nbytes for layer in layers)
    worst = 0.0
    for layer in reversed(layers):
        ready += layer.backward_s
        worst = max(worst, ready + left * per_byte)
        left -= layer.nbytes
    return worst


def forward_floor(layers: Sequence[LayerCosts], per_byte: float) -> float:
    """Time from the first gather until forward ends.

    Seen backwards in time a layer's parameters leave when it has run, the last layer first, which
    is ``backward_floor`` with forward's times.
    """
    mirrored = [LayerCosts(0.0, layer.forward_s, layer.nbytes) for layer in layers]
    return backward_floor(mirrored, per_byte)
