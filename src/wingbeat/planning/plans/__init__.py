"""Which tensors travel together, and how to find out which should."""

from __future__ import annotations

from collections.abc import Sequence

from wingbeat.planning.costs import Workload
from wingbeat.planning.plans import merge
from wingbeat.planning.plans.colayers import Measured, bundled
from wingbeat.planning.plans.fixed import fixed
from wingbeat.planning.plans.layers import layers, none
from wingbeat.types import Fusion, Plan, TensorSpec

__all__ = ["Measured", "fixed", "layers", "make", "none"]


def make(
    fusion: Fusion,
    specs: Sequence[TensorSpec],
    order: Sequence[int],
    measured: Measured | None = None,
) -> Plan:
    """Turn a rule into a plan.

    Args:
        fusion: the rule.
        specs: every tensor of the model.
        order: indices into ``specs``, in the order in which gradients become ready.
        measured: what was measured of them, for a rule that goes by it; None for nothing yet.
    """
    if fusion.kind == "layers":
        return layers(specs, order, fusion.layers)
    if fusion.kind == "colayers":
        least = fusion.least or None if measured else None
        return bundled(specs, order, fusion.layers, measured, least)
    if fusion.kind == "none":
        return none(order)
    if fusion.kind == "one":
        return merge.one(_unmeasured(specs, order))
    if fusion.kind == "elements":
        return merge.by_size(_unmeasured(specs, order), fusion.elements)
    return fixed(specs, order, fusion.bucket_bytes, fusion.first_bytes, fusion.last_bytes)


def _unmeasured(specs: Sequence[TensorSpec], order: Sequence[int]) -> Workload:
    """Return what is known of a backward that has not been measured: who comes after whom."""
    return Workload(
        tensors=tuple(order),
        ready_s=(0.0,) * len(order),
        numels=tuple(specs[index].numel for index in order),
        nbytes=tuple(float(specs[index].nbytes) for index in order),
        kinds=tuple(specs[index].kind for index in order),
    )
