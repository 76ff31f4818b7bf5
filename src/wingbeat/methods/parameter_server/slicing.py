"""Which part of which bucket goes to which server, and in which pieces. Pure.

Geryon (Wang et al., 2020), section IV: "we partition each parameter into multiple shards, with one
shard on each PS", and "perform fine-grained parameter slicing based on partition result".
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from wingbeat.types import Span, split

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
        link: by which it travels, counted from 0.
    """

    number: int
    bucket: int
    start: int
    stop: int
    server: int
    link: int = 0

    def __len__(self) -> int:
        return self.stop - self.start


class _Links:
    """What each link to each server carries, so that all are done at the same time.

    Args:
        weights: of each link, its part of the speed of all.
    """

    def __init__(self, servers: int, weights: Sequence[float]) -> None:
        self._weights = weights
        self._load = [[0.0] * len(weights) for _ in range(servers)]

    def whole(self, server: int, numel: int) -> int:
        """Return the link that is done first with so many elements more."""
        load = self._load[server]
        ends = [(load[k] + numel) / weight for k, weight in enumerate(self._weights)]
        link = ends.index(min(ends))
        load[link] += numel
        return link

    def parts(
        self, server: int, start: int, stop: int, smallest: int
    ) -> Iterator[tuple[int, int, int]]:
        """Yield the bounds of a shard's parts, each with its link.

        Links are left out whose part would be below ``smallest``.
        """
        numel = stop - start
        chosen = [k for k, weight in enumerate(self._weights) if weight * numel >= smallest]
        if len(chosen) < 2:
            yield start, stop, self.whole(server, numel)
            return
        spans = split(Span(start, stop), [self._weights[k] for k in chosen])
        for link, span in zip(chosen, spans, strict=True):
            self._load[server][link] += len(span)
            yield span.start, span.stop, link


def partitioned(
    sizes: Sequence[int],
    servers: int,
    threshold: int | None,
    smallest: int = SMALLEST,
    weights: Sequence[float] = (1.0,),
) -> tuple[Slice, ...]:
    """Cut every bucket evenly among the servers, and what is too large into slices.

    A bucket that would be cut below ``smallest`` goes to fewer servers, those with the least load;
    and a shard by fewer links.

    Args:
        sizes: elements of each bucket.
        servers: how many there are.
        threshold: the most elements in a slice, the paper's "parameter slicing threshold"; None:
            shards are not cut any further (its "partition" alone).
        smallest: the fewest elements in a shard, and in a link's part of it, unless the bucket has
            fewer.
        weights: of each link to the servers, its part of the speed of all.
    """
    links = _Links(servers, weights)
    load = [(0, server) for server in range(servers)]
    found: list[Slice] = []
    for bucket, numel in enumerate(sizes):
        shards = min(servers, max(1, numel // smallest))
        chosen = sorted(heapq.nsmallest(shards, load), key=lambda entry: entry[1])
        for (start, stop), (before, server) in zip(_even(0, numel, shards), chosen, strict=True):
            load[server] = before + stop - start, server
            for begin, end, link in links.parts(server, start, stop, smallest):
                pieces = -(-(end - begin) // (threshold or max(1, numel)))
                for first, last in _even(begin, end, pieces):
                    found.append(Slice(len(found), bucket, first, last, server, link))
    return tuple(found)


def placed(
    sizes: Sequence[int], servers: int, limit: int, weights: Sequence[float] = (1.0,)
) -> tuple[Slice, ...]:
    """Place whole buckets, one server after the other, as TensorFlow does (section II-B).

    Args:
        sizes: elements of each bucket.
        servers: how many there are.
        limit: the most elements in a message. A larger bucket takes several, each of which is
            summed and sent by itself: TensorFlow waits for all of it, and is slower for that.
        weights: of each link to the servers, its part of the speed of all.
    """
    # Of one server's few buckets no links would carry as much: they are counted together.
    links = _Links(1, weights)
    found: list[Slice] = []
    for bucket, numel in enumerate(sizes):
        for first, last in _even(0, numel, -(-numel // limit)):
            link = links.whole(0, last - first)
            found.append(Slice(len(found), bucket, first, last, bucket % servers, link))
    return tuple(found)


def _even(start: int, stop: int, parts: int) -> Iterator[tuple[int, int]]:
    """Yield the bounds of so many parts that differ by one element at most."""
    numel = stop - start
    for part in range(parts):
        yield start + numel * part // parts, start + numel * (part + 1) // parts
