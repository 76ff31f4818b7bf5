"""Costs of layers, and lower bounds on the time of communication-bound passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """Compute times of a layer in seconds, and bytes of its gradients on the wire."""

    forward_s: float
    backward_s: float
    nbytes: float


def backward_floor(layers: Sequence[LayerCosts], per_byte: float) -> float:
    """Return a lower bound on the time from the start of backward until all gradients arrive.

    The link is ideal: no latency, no headers, and messages may be cut anywhere. This is the
    scheduling of jobs with release times on one machine. The last busy period begins at some
    layer's release and contains all later layers, so the bound is the longest such period.
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
    """Return a lower bound on the time from the first all-gather until forward ends.

    Reversed in time, this is `backward_floor` with the times of forward.
    """
    mirrored = [LayerCosts(0.0, layer.forward_s, layer.nbytes) for layer in layers]
    return backward_floor(mirrored, per_byte)
