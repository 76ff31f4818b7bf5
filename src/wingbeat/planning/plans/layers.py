"""Buckets of a fixed number of nearby layers (DeAR-NL, section VI-G), or of one tensor each."""

from __future__ import annotations

from collections.abc import Sequence

from wingbeat.planning.plans.fixed import in_ready_order
from wingbeat.types import Plan, TensorSpec


def layers(specs: Sequence[TensorSpec], order: Sequence[int], count: int) -> Plan:
    """Put ``count`` nearby layers into one bucket; a bucket holds one dtype on one device.

    A layer is the module that tensors belong to: ``fc.weight`` and ``fc.bias`` are of ``fc``.

    Args:
        specs: every tensor of the model.
        order: indices into ``specs``, first ready first; each exactly once.
        count: layers in a bucket, 1 or more.
    """
    number: dict[str, int] = {}
    buckets: dict[tuple[int, str, str], list[int]] = {}
    for index in order:
        spec = specs[index]
        layer = number.setdefault(spec.name.rpartition(".")[0], len(number))
        buckets.setdefault((layer // count, spec.dtype, spec.device), []).append(index)
    return in_ready_order([tuple(tensors) for tensors in buckets.values()], order)


def none(order: Sequence[int]) -> Plan:
    """Send every tensor alone: no tensor fusion."""
    return in_ready_order([(index,) for index in order], order)
