"""Which part of which bucket goes to which server, and in which pieces. Pure.

Geryon (Wang et al., 2020), section IV: "we partition each parameter into multiple shards, with one
shard on each PS", and "perform fine-grained parameter slicing based on partition result".
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

SMALLEST = 4096
"""Elements below which a shard is not worth a message of its own."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A contiguous part of one bucket: what a server sums at a time.

    Attributes:
        number: among all slices of the plan.
        bucket: whose buffer it is part of.
        start: its first element there.
        stop: the element after its last.
        server: who sums it, counted from 0.
    """

    number: int
    bucket: int
    start: int
    stop: int
    server: int

    def __len__(self) -> int:
        return self.stop - self.start


def partitioned(
    sizes: Sequence[int], servers: int, threshold: int | None, smallest: int = SMALLEST
) -> tuple[Slice, ...]:
    """Cut every bucket evenly among the servers, and what is too large into slices.

    A bucket that would be cut below ``smallest`` goes to fewer servers, those with the least load.

    Args:
        sizes: elements of each bucket.
        servers: how many there are.
        threshold: the most elements in a slice, the paper's "parameter slicing threshold"; None:
            shards are not cut any further (its "partition" alone).
        smallest: the fewest elements in a shard, unless the bucket has fewer.
    """
    load = [(0, server) for server in range(servers)]
    found: list[Slice] = []
    for bucket, numel in enumerate(sizes):
        shards = min(servers, max(1, numel // smallest))
        chosen = sorted(heapq.nsmallest(shards, load), key=lambda entry: entry[1])
        for (start, stop), (before, server) in zip(_even(0, numel, shards), chosen, strict=True):
            load[server] = before + stop - start, server
            pieces = -(-(stop - start) // (threshold or max(1, numel)))
            for first, last in _even(start, stop, pieces):
                found.append(Slice(len(found), bucket, first, last, server))
    return tuple(found)


def placed(sizes: Sequence[int], servers: int, limit: int) -> tuple[Slice, ...]:
    """Place whole buckets, one server after the other, as TensorFlow does (section II-B).

    Args:
        sizes: elements of each bucket.
        servers: how many there are.
        limit: the most elements in a message. A larger bucket takes several, each of which is
            summed and sent by itself: TensorFlow waits for all of it, and is slower for that.
    """
    found: list[Slice] = []
    for bucket, numel in enumerate(sizes):
        for first, last in _even(0, numel, -(-numel // limit)):
            found.append(Slice(len(found), bucket, first, last, bucket % servers))
    return tuple(found)


def _even(start: int, stop: int, parts: int) -> Iterator[tuple[int, int]]:
    """Yield the bounds of so many parts that differ by one element at most."""
    numel = stop - start
    for part in range(parts):
        yield start + numel * part // parts, start + numel * (part + 1) // parts
