"""Bucketing rules: which tensors share a bucket, without measurements or by colayers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from wingbeat.planning import merge
from wingbeat.planning.colayers import Measured, colayer_plan
from wingbeat.planning.costs import Workload
from wingbeat.types import Fusion, Plan, PlannedBucket, TensorSpec


def make_plan(
    fusion: Fusion,
    specs: Sequence[TensorSpec],
    order: Sequence[int],
    measured: Measured | None = None,
) -> Plan:
    """Apply a bucketing rule to a model; ``measured`` is None before there are measurements."""
    if fusion.kind == "layers":
        return by_layers(specs, order, fusion.layers)
    if fusion.kind == "colayers":
        least = fusion.least or None if measured else None
        return colayer_plan(specs, order, fusion.layers, measured, least)
    if fusion.kind == "none":
        return in_ready_order([(index,) for index in order], order)
    if fusion.kind == "one":
        return merge.single_bucket(_unmeasured(specs, order))
    if fusion.kind == "elements":
        return merge.by_elements(_unmeasured(specs, order), fusion.elements)
    return by_size(specs, order, fusion.bucket_bytes, fusion.first_bytes, fusion.last_bytes)


def _unmeasured(specs: Sequence[TensorSpec], order: Sequence[int]) -> Workload:
    """Return the backward pass of a model of which only the order is known."""
    return Workload(
        tensors=tuple(order),
        ready_s=(0.0,) * len(order),
        numels=tuple(specs[index].numel for index in order),
        nbytes=tuple(float(specs[index].nbytes) for index in order),
        kinds=tuple(specs[index].kind for index in order),
    )


def by_layers(specs: Sequence[TensorSpec], order: Sequence[int], count: int) -> Plan:
    """Put ``count`` consecutive layers into a bucket (DeAR-NL, section VI-G).

    A bucket holds one dtype on one device. A layer is the module that tensors belong to:
    ``fc.weight`` and ``fc.bias`` are of ``fc``.
    """
    number: dict[str, int] = {}
    buckets: dict[tuple[int, str, str], list[int]] = {}
    for index in order:
        spec = specs[index]
        layer = number.setdefault(spec.name.rpartition(".")[0], len(number))
        buckets.setdefault((layer // count, spec.dtype, spec.device), []).append(index)
    return in_ready_order([tuple(tensors) for tensors in buckets.values()], order)


def by_size(
    specs: Sequence[TensorSpec],
    order: Sequence[int],
    bucket_bytes: int,
    first_bytes: int = 0,
    last_bytes: int = 0,
) -> Plan:
    """Fill buckets up to a size, in the order in which gradients become ready (DeAR-FB, IV-A).

    A bucket holds one dtype on one device. A tensor larger than the bucket travels alone. All sizes
    from the total of a kind on make the same plan. The exchange of the bucket that is ready last is
    exposed (its reduce-scatter ends the backward pass, its all-gather begins the next forward), and
    the links idle until the first bucket is ready. Both may therefore be smaller than the others.
    Sizes double from each edge, because the bucket before hides twice as much.
    """
    kinds: dict[str, list[int]] = {}
    for index in order:
        kinds.setdefault(specs[index].kind, []).append(index)
    buckets: list[tuple[int, ...]] = []
    for members in kinds.values():
        limit = min(bucket_bytes, sum(specs[t].nbytes for t in members))
        # The end is tapered first; the rest is filled from its beginning.
        tail, rest = _taper(specs, members[::-1], limit, last_bytes)
        head, middle = _taper(specs, rest[::-1], limit, first_bytes)
        buckets += map(tuple, [*head, *_fill(specs, middle, limit)])
        buckets += [tuple(tensors[::-1]) for tensors in reversed(tail)]
    return in_ready_order(buckets, order)


def in_ready_order(buckets: Sequence[tuple[int, ...]], order: Sequence[int]) -> Plan:
    """Sort buckets by when each becomes complete."""
    ready = {index: position for position, index in enumerate(order)}
    complete = sorted(buckets, key=lambda tensors: max(ready[t] for t in tensors))
    return Plan(tuple(PlannedBucket(tensors) for tensors in complete))


def _taper(
    specs: Sequence[TensorSpec], members: list[int], limit: int, edge: int
) -> tuple[list[list[int]], list[int]]:
    """Cut buckets of ``edge`` bytes, twice that and so on below ``limit``; also return the rest."""
    out: list[list[int]] = []
    placed = 0
    while members and 0 < edge < limit:
        # After a tensor larger than the edge, the next bucket may be as large.
        edge = max(edge, placed)
        size = min(edge, limit)
        tensors = next(_fill(specs, members, size, least=size // 8))
        out.append(tensors)
        placed += sum(specs[t].nbytes for t in tensors)
        members = members[len(tensors) :]
        edge *= 2
    return out, members


def _fill(
    specs: Sequence[TensorSpec], members: Sequence[int], limit: int, least: int = 0
) -> Iterator[list[int]]:
    """Cut buckets of up to ``limit`` bytes; one with less than ``least`` takes another tensor."""
    tensors: list[int] = []
    nbytes = 0
    for index in members:
        if tensors and nbytes >= least and nbytes + specs[index].nbytes > limit:
            yield tensors
            tensors, nbytes = [], 0
        tensors.append(index)
        nbytes += specs[index].nbytes
    if tensors:
        yield tensors
