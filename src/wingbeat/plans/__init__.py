"""Which tensors travel together, and how to find out which should."""

from __future__ import annotations

from collections.abc import Sequence

from wingbeat.plans.fixed import fixed
from wingbeat.plans.layers import layers, none
from wingbeat.types import Fusion, Plan, TensorSpec

__all__ = ["fixed", "layers", "make", "none"]


def make(fusion: Fusion, specs: Sequence[TensorSpec], order: Sequence[int]) -> Plan:
    """Turn a rule into a plan.

    Args:
        fusion: the rule.
        specs: every tensor of the model.
        order: indices into ``specs``, in the order in which gradients become ready.
    """
    if fusion.kind == "layers":
        return layers(specs, order, fusion.layers)
    if fusion.kind == "none":
        return none(order)
    return fixed(specs, order, fusion.bucket_bytes, fusion.first_bytes, fusion.last_bytes)
