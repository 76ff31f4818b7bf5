"""Fixed-size buckets: nearby tensors share a bucket while they fit (DeAR-FB, section IV-A)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from wingbeat.types import Bucket, Plan, TensorSpec


@dataclass
class _Open:
    limit: int
    nbytes: int = 0
    tensors: list[int] = field(default_factory=list)


def fixed(
    specs: Sequence[TensorSpec],
    order: Sequence[int],
    bucket_bytes: int,
    first_bucket_bytes: int | None = None,
) -> Plan:
    """Group the tensors, in the order in which their gradients become ready.

    A bucket holds one dtype on one device. A tensor larger than the bucket travels alone.

    Args:
        specs: every tensor of the model.
        order: indices into ``specs``, first ready first; each exactly once.
        bucket_bytes: size above which a bucket is closed.
        first_bucket_bytes: the same for the first bucket of each dtype and device.

    Returns:
        The plan; buckets are in the order in which they become complete.
    """
    closed: list[tuple[int, ...]] = []
    open_buckets: dict[tuple[str, str], _Open] = {}
    for index in order:
        spec = specs[index]
        kind = (spec.dtype, spec.device)
        bucket = open_buckets.setdefault(kind, _Open(first_bucket_bytes or bucket_bytes))
        if bucket.tensors and bucket.nbytes + spec.nbytes > bucket.limit:
            closed.append(tuple(bucket.tensors))
            bucket = open_buckets[kind] = _Open(bucket_bytes)
        bucket.tensors.append(index)
        bucket.nbytes += spec.nbytes
    closed += [tuple(bucket.tensors) for bucket in open_buckets.values()]
    ready = {index: position for position, index in enumerate(order)}
    closed.sort(key=lambda tensors: ready[tensors[-1]])
    return Plan(tuple(Bucket(tensors) for tensors in closed))
