"""What one worker asks of the servers, in slices: which, in which class, in which order. Pure."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from wingbeat.methods.parameter_server.priorities import Priorities
from wingbeat.methods.parameter_server.protocol import Ids, Kind, wish_of
from wingbeat.methods.parameter_server.slicing import Slice, partitioned, placed
from wingbeat.methods.parameter_server.tables import Places
from wingbeat.schedules.events import Operation
from wingbeat.types import Serving

KINDS = {
    Operation.ALL_REDUCE: Kind.PUSH,
    Operation.PUSH: Kind.STORE,
    Operation.PULL: Kind.PULL,
    Operation.FETCH: Kind.FETCH,
    Operation.EXPECT: Kind.EXPECT,
}
"""What the servers are told of an operation on a bucket."""


class Asked(NamedTuple):
    """A slice that is to be pushed or pulled.

    Attributes:
        slice: which part of the bucket, and whose.
        ids: what the message says.
        urgency: the class in which gradients are pushed, 0 the most urgent.
        position: the bucket's place in the order of forward.
    """

    slice: Slice
    ids: Ids
    urgency: int
    position: int


class Requests:
    """Cuts buckets for the servers, and counts what was asked of each.

    Args:
        serving: how gradients go to the servers.
        servers: how many there are.
        seed: of the order of pulls, where that is random.
        weights: of each link to the servers, its part of the speed of all.

    Attributes:
        priorities: the class of each bucket, by its place in the order of forward.
    """

    def __init__(
        self, serving: Serving, servers: int, seed: int, weights: Sequence[float] = (1.0,)
    ) -> None:
        self._serving, self._servers, self._weights = serving, servers, tuple(weights)
        self._random = random.Random(seed)
        self._plan = 0
        self._slices: list[list[Slice]] = []
        self._places: dict[int, int] = {}
        self._rounds: list[int] = []
        self._pulls: list[int] = []
        self.priorities = Priorities(serving)

    def planned(
        self,
        sizes: Sequence[int],
        forward: Sequence[int],
        fully_connected: Sequence[bool],
        places: Places,
        largest: int,
    ) -> None:
        """From now on there are these buckets.

        Args:
            sizes: elements of each.
            forward: all of them, that first which forward needs first.
            fully_connected: of each, whether it is of fully connected layers alone.
            places: where they lie among the layers, first needed first.
            largest: the most elements in a message.
        """
        serving, servers, weights = self._serving, self._servers, self._weights
        if serving.whole:
            slices = placed(sizes, servers, largest, weights)
        else:
            threshold = min(serving.slice or largest, largest)
            slices = partitioned(sizes, servers, threshold, weights=weights)
        self._plan += 1
        self._slices = [[] for _ in sizes]
        for each in slices:
            self._slices[each.bucket].append(each)
        self._places = {bucket: place for place, bucket in enumerate(forward)}
        self._rounds, self._pulls = [-1] * len(sizes), []
        self.priorities.planned([fully_connected[bucket] for bucket in forward], places)

    def most_slices(self) -> int:
        """Return how many slices the server has that has most of them."""
        counts = Counter(each.server for slices in self._slices for each in slices)
        return max(counts.values())

    def prioritise(self, thresholds: Sequence[float]) -> None:
        """Change the thresholds between the classes.

        What is under way stays in its class. What is asked for from now on goes by the new ones,
        also where its gradients were pushed before: servers go by what each request says.

        Raises:
            UsageError: not one less than there are classes, or none that fall; or classes are by
                kind of layer.
        """
        self.priorities.change(thresholds)

    def begin(self, operation: Operation, bucket: int) -> list[int]:
        """Note that an operation begins; return the buckets to do it on now, in that order.

        Where pulls are in random order they begin with the last one.
        """
        if operation in (Operation.ALL_REDUCE, Operation.PUSH):
            self._rounds[bucket] += 1
        elif self._serving.shuffled and operation is not Operation.EXPECT:
            self._pulls.append(bucket)
            if len(self._pulls) < len(self._slices):
                return []
            together, self._pulls = self._pulls, []
            self._random.shuffle(together)
            return together
        return [bucket]

    @property
    def plan(self) -> int:
        """How often buckets have been made."""
        return self._plan

    def slices(self) -> list[Slice]:
        """Return all slices of all buckets."""
        return [each for slices in self._slices for each in slices]

    def round(self) -> int:
        """Return how often all buckets had been summed before the last time."""
        return min(self._rounds)

    def asked(self, bucket: int) -> list[Asked]:
        """Return the slices of a bucket, as they are to be pushed or pulled now."""
        place = self._places[bucket]
        out = self.priorities.of_push(place)
        back, turn = self.priorities.of_sum(place), self._rounds[bucket]
        return [
            Asked(each, Ids(self._plan, each.number, turn, wish), out, place)
            for each in self._slices[bucket]
            for wish in (wish_of(back, place, each.link),)
        ]
