"""Buckets of a fixed size: nearby tensors share one while they fit (DeAR-FB, section IV-A)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from wingbeat.types import Plan, PlannedBucket, TensorSpec


def fixed(
    specs: Sequence[TensorSpec],
    order: Sequence[int],
    bucket_bytes: int,
    first_bytes: int = 0,
    last_bytes: int = 0,
) -> Plan:
    """Group the tensors, in the order in which their gradients become ready.

    A bucket holds one dtype on one device. A tensor larger than the bucket travels alone. A size
    above all there is of a kind is the same as that: so all sizes from there on are one plan.
    Nothing hides the exchange of the bucket that is ready last (its reduce-scatter ends the
    backward pass, its all-gather begins the next forward), and the links idle until the first is
    ready. So both may be smaller than the others; from each edge sizes double, because by then
    the bucket before has bought as much time.

    Args:
        specs: every tensor of the model.
        order: indices into ``specs``, first ready first; each exactly once.
        bucket_bytes: size above which a bucket is closed.
        first_bytes: the same for the first bucket of each dtype and device; 0: ``bucket_bytes``.
        last_bytes: the same for the last bucket of each dtype and device; 0: ``bucket_bytes``.

    Returns:
        The plan; buckets are in the order in which they become complete.
    """
    kinds: dict[str, list[int]] = {}
    for index in order:
        kinds.setdefault(specs[index].kind, []).append(index)
    buckets = [
        tuple(tensors)
        for members in kinds.values()
        for tensors in _fuse(
            specs, members, min(bucket_bytes, _total(specs, members)), first_bytes, last_bytes
        )
    ]
    return in_ready_order(buckets, order)


def _total(specs: Sequence[TensorSpec], members: Sequence[int]) -> int:
    return sum(specs[t].nbytes for t in members)


def in_ready_order(buckets: Sequence[tuple[int, ...]], order: Sequence[int]) -> Plan:
    """Sort buckets by when each becomes complete."""
    ready = {index: position for position, index in enumerate(order)}
    complete = sorted(buckets, key=lambda tensors: max(ready[t] for t in tensors))
    return Plan(tuple(PlannedBucket(tensors) for tensors in complete))


def _fuse(
    specs: Sequence[TensorSpec], members: Sequence[int], limit: int, first: int, last: int
) -> Iterator[list[int]]:
    """Taper the end off first, then fill up the rest from its beginning."""
    tail, rest = _taper(specs, list(reversed(members)), limit, last)
    head, middle = _taper(specs, list(reversed(rest)), limit, first)
    yield from head
    yield from _fill(specs, middle, limit)
    for tensors in reversed(tail):
        yield tensors[::-1]


def _taper(
    specs: Sequence[TensorSpec], members: list[int], limit: int, edge: int
) -> tuple[list[list[int]], list[int]]:
    """Cut buckets of ``edge`` bytes, twice that and so on up to ``limit``; and what is left."""
    out: list[list[int]] = []
    placed = 0
    while members and 0 < edge < limit:
        # What a tensor larger than the edge takes, the next bucket may take as well.
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
    """Cut buckets of up to ``limit`` bytes, or one tensor more where there are not ``least``."""
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
