"""Slices of buckets: server, link and traffic class of each; without I/O.

Geryon (Wang et al., 2020), section IV: "we partition each parameter into multiple shards, with one
shard on each PS", and "perform fine-grained parameter slicing based on partition result". The
traffic class follows from the layer's position in forward order (section III-C).
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from wingbeat.errors import UsageError
from wingbeat.methods.parameter_server.options import Servers
from wingbeat.methods.parameter_server.protocol import Ids, Kind, pack_route
from wingbeat.schedules.events import Operation
from wingbeat.types import LayerPositions, Span, split

MIN_SHARD = 4096
"""Minimum elements of a shard; smaller messages cost more than they save."""

KIND_OF = {
    Operation.ALL_REDUCE: Kind.PUSH_PULL,
    Operation.PUSH: Kind.PUSH,
    Operation.PULL: Kind.PULL,
    Operation.FETCH: Kind.FETCH,
    Operation.EXPECT: Kind.EXPECT,
}
"""The request that starts an operation on a bucket."""


# -- partitioning --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements ``start`` to ``stop`` of a bucket, which one server sums.

    ``number`` is the index among all slices of the plan.
    """

    number: int
    bucket: int
    start: int
    stop: int
    server: int
    link: int = 0

    def __len__(self) -> int:
        return self.stop - self.start


class _LinkLoads:
    """Balances the elements on each link to each server, in proportion to the links' speeds."""

    def __init__(self, servers: int, weights: Sequence[float]) -> None:
        self._weights = weights
        self._load = [[0.0] * len(weights) for _ in range(servers)]

    def assign(self, server: int, numel: int) -> int:
        """Return the link that finishes first with ``numel`` more elements."""
        load = self._load[server]
        ends = [(load[k] + numel) / weight for k, weight in enumerate(self._weights)]
        link = ends.index(min(ends))
        load[link] += numel
        return link

    def divide(self, server: int, shard: Span, smallest: int) -> Iterator[tuple[Span, int]]:
        """Yield the parts of a shard with their links, none below ``smallest`` elements."""
        chosen = [k for k, weight in enumerate(self._weights) if weight * len(shard) >= smallest]
        if len(chosen) < 2:
            yield shard, self.assign(server, len(shard))
            return
        for link, part in zip(
            chosen, split(shard, [self._weights[k] for k in chosen]), strict=True
        ):
            self._load[server][link] += len(part)
            yield part, link


def partition_buckets(
    sizes: Sequence[int],
    servers: int,
    threshold: int | None,
    smallest: int = MIN_SHARD,
    weights: Sequence[float] = (1.0,),
) -> tuple[Slice, ...]:
    """Divide every bucket evenly among the servers, and large shards into slices.

    A shard has at least ``smallest`` elements: a small bucket uses fewer servers, those with the
    least load, and a small shard fewer links. ``threshold`` is the paper's "parameter slicing
    threshold", in elements; None keeps each shard in one slice (the paper's "partition" alone).
    ``weights`` are each link's share of the total speed.
    """
    links = _LinkLoads(servers, weights)
    load = [(0, server) for server in range(servers)]
    slices: list[Slice] = []
    for bucket, numel in enumerate(sizes):
        shards = min(servers, max(1, numel // smallest))
        chosen = sorted(heapq.nsmallest(shards, load), key=lambda entry: entry[1])
        for shard, (before, server) in zip(_even(Span(0, numel), shards), chosen, strict=True):
            load[server] = before + len(shard), server
            for part, link in links.divide(server, shard, smallest):
                for span in _even(part, -(-len(part) // (threshold or max(1, numel)))):
                    slices.append(Slice(len(slices), bucket, span.start, span.stop, server, link))
    return tuple(slices)


def place_buckets(
    sizes: Sequence[int], servers: int, limit: int, weights: Sequence[float] = (1.0,)
) -> tuple[Slice, ...]:
    """Assign whole buckets to servers in round-robin order, as TensorFlow does (section II-B).

    A bucket above ``limit`` elements takes several messages, which are summed and sent
    independently. TensorFlow waits for the whole bucket, which is slower. ``weights`` are each
    link's share of the total speed.
    """
    # One server has too few buckets to balance its links, so the links of all servers are balanced.
    links = _LinkLoads(1, weights)
    slices: list[Slice] = []
    for bucket, numel in enumerate(sizes):
        for span in _even(Span(0, numel), -(-numel // limit)):
            link = links.assign(0, len(span))
            server = bucket % servers
            slices.append(Slice(len(slices), bucket, span.start, span.stop, server, link))
    return tuple(slices)


def _even(span: Span, parts: int) -> Iterator[Span]:
    """Yield ``parts`` parts whose sizes differ by at most one element."""
    numel = len(span)
    for part in range(parts):
        yield Span(span.start + numel * part // parts, span.start + numel * (part + 1) // parts)


# -- traffic classes -----------------------------------------------------------------------


def urgency_level(position: int, layers: int) -> float:
    """Return ``1 - l/L``, the urgency of layer ``position`` (section III-C)."""
    # ``1 - l / L`` rounds twice; this form meets a threshold of 0.3 at layer 7 of 10.
    return (layers - position) / layers


def layer_positions(buckets: Sequence[Sequence[str]]) -> LayerPositions:
    """Return the layer positions of buckets, given their parameters' names in forward order.

    >>> layer_positions(
    ...     [["conv1.weight", "conv1.bias", "conv2.weight"], ["conv2.bias"], ["fc.weight"]]
    ... )
    LayerPositions(first=(1, 2, 3), layers=3)
    """
    number: dict[str, int] = {}
    first = []
    for names in buckets:
        layers = [name.rpartition(".")[0] for name in names]
        first.append(min(number.setdefault(layer, len(number) + 1) for layer in layers))
    return LayerPositions(tuple(first), len(number))


def priority_classes(places: LayerPositions, thresholds: Sequence[float]) -> tuple[int, ...]:
    """Return the traffic class of each bucket, 0 the most urgent: the paper's ``map_table``.

    A bucket is as urgent as its first layer in forward order. Buckets above the first threshold
    have class 0, buckets above no threshold the last class.

    Raises:
        UsageError: the thresholds do not fall from 1 to 0.
    """
    levels = tuple(thresholds)
    fall = all(a > b for a, b in itertools.pairwise(levels))
    if not fall or not all(0 <= level <= 1 for level in levels):
        raise UsageError(f"thresholds={levels!r}: allowed are falling numbers from 1 to 0")
    urgencies = [urgency_level(position, places.layers) for position in places.first]
    return tuple(sum(level <= threshold for threshold in levels) for level in urgencies)


class BucketPriorities:
    """The traffic classes of a model's buckets, by position in forward order.

    Classes follow urgency, or with ``options.coarse`` the kind of layer (section III-B): buckets
    with only fully connected layers have class 1, all others class 0.
    """

    def __init__(self, options: Servers) -> None:
        self._options = options
        self.thresholds = options.levels
        self.set_buckets((), LayerPositions((), 1))

    def set_buckets(self, fully_connected: Sequence[bool], places: LayerPositions) -> None:
        """Replace the buckets; both arguments are in forward order."""
        self._places = places
        self.classes = (
            tuple(map(int, fully_connected))
            if self._options.coarse
            else priority_classes(places, self.thresholds)
        )

    def set_thresholds(self, thresholds: Sequence[float]) -> None:
        """Change the thresholds between the classes.

        Raises UsageError if the number of thresholds does not match the classes, the thresholds do
        not fall, or classes depend on the kind of layer.
        """
        levels, options = tuple(thresholds), self._options
        if options.coarse or len(levels) != options.classes - 1:
            raise UsageError(
                f"thresholds={levels!r}: there are {options.classes} classes, "
                f"{'by kind of layer' if options.coarse else 'with one less between them'}"
            )
        self.classes = priority_classes(self._places, levels)
        self.thresholds = levels

    def of_reply(self, position: int) -> int:
        """Return the class of a bucket's sum."""
        return self.classes[position]

    def of_push(self, position: int) -> int:
        """Return the class of a bucket's gradients."""
        return self.classes[position] if self._options.pushes else self._options.classes - 1


# -- one worker's requests -----------------------------------------------------------------


class SliceRequest(NamedTuple):
    """A push or pull of one slice; ``urgency`` is the class of a push."""

    slice: Slice
    ids: Ids
    urgency: int
    position: int


class RequestPlanner:
    """Divides buckets into slices, and numbers the rounds of each bucket.

    ``seed`` applies to a random order of pulls; ``weights`` are each link's share of the total
    speed.

    Attributes:
        plan: how often buckets were set.
    """

    def __init__(
        self, options: Servers, servers: int, seed: int, weights: Sequence[float] = (1.0,)
    ) -> None:
        self._options, self._servers, self._weights = options, servers, tuple(weights)
        self._random = random.Random(seed)
        self._slices: list[list[Slice]] = []
        self._positions: dict[int, int] = {}
        self._rounds: list[int] = []
        self._pulls: list[int] = []
        self.plan = 0
        self.priorities = BucketPriorities(options)

    def set_buckets(
        self,
        sizes: Sequence[int],
        forward: Sequence[int],
        fully_connected: Sequence[bool],
        places: LayerPositions,
        largest: int,
    ) -> None:
        """Replace the buckets.

        ``forward`` are the indices of the buckets in forward order. ``fully_connected`` states for
        each bucket whether it has only parameters of fully connected layers. ``places`` are layer
        positions in forward order. ``largest`` is the maximum number of elements of a message.
        """
        options, servers, weights = self._options, self._servers, self._weights
        if options.whole:
            slices = place_buckets(sizes, servers, largest, weights)
        else:
            threshold = min(options.slice or largest, largest)
            slices = partition_buckets(sizes, servers, threshold, weights=weights)
        self.plan += 1
        self._slices = [[] for _ in sizes]
        for each in slices:
            self._slices[each.bucket].append(each)
        self._positions = {bucket: position for position, bucket in enumerate(forward)}
        self._rounds, self._pulls = [-1] * len(sizes), []
        self.priorities.set_buckets([fully_connected[bucket] for bucket in forward], places)

    def slices(self) -> list[Slice]:
        """Return all slices of all buckets."""
        return [each for slices in self._slices for each in slices]

    def max_slices(self) -> int:
        """Return the number of slices on the server with the most slices."""
        return max(Counter(each.server for each in self.slices()).values())

    def begin(self, operation: Operation, bucket: int) -> list[int]:
        """Record the start of an operation; return the buckets to start it on now, in order.

        If the order of pulls is random, all pulls start with the last one.
        """
        if operation in (Operation.ALL_REDUCE, Operation.PUSH):
            self._rounds[bucket] += 1
        elif self._options.shuffled and operation is not Operation.EXPECT:
            self._pulls.append(bucket)
            if len(self._pulls) < len(self._slices):
                return []
            pulls, self._pulls = self._pulls, []
            self._random.shuffle(pulls)
            return pulls
        return [bucket]

    def completed_rounds(self) -> int:
        """Return the round number that every bucket has reached."""
        return min(self._rounds)

    def requests(self, bucket: int) -> list[SliceRequest]:
        """Return the requests for the slices of a bucket, in the bucket's current round."""
        position = self._positions[bucket]
        push = self.priorities.of_push(position)
        reply, number = self.priorities.of_reply(position), self._rounds[bucket]
        return [
            SliceRequest(
                each,
                Ids(self.plan, each.number, number, pack_route(reply, position, each.link)),
                push,
                position,
            )
            for each in self._slices[bucket]
        ]
