"""How the generator chooses groups: the worker pool, its connectivity, and the policies.

A policy maps an initiator and the worker pool to groups, in the order in which they run (Ripples,
sections 4.1, 5.1 and 5.2). The initiator is in at least one of them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import TypeAlias

from wingbeat.methods.model_averaging.rules import Layout, Rules

_BRIDGE_DRAWS = 16
"""Draws of a worker of another component, before the search is left to the next request."""

_MEMBER_DRAWS = 8
"""Draws per member of a random group until one is fast enough and not in the group yet."""


class WorkerPool:
    """The active workers, their request counters, and which of them are idle.

    Calls take constant time, except `take_idle`, whose time grows with the workers it returns, and
    `fastest`. Every ``rules.forget`` requests of the fastest worker all counters are halved.

    Attributes:
        rng: the source of all random choices.
        active: the workers that take part, in no order.
        requests: by worker, the requests that it has sent; halved periodically.
    """

    def __init__(self, layout: Layout, rules: Rules, rng: Random) -> None:
        self.layout, self.rules, self.rng = layout, rules, rng
        self.active = list(range(layout.workers))
        self.requests = [0] * layout.workers
        self._position = list(range(layout.workers))
        # Idle workers by number of requests, so a division skips filtered workers without visiting
        # them. Only divisions need this index.
        self._tracks_idle = rules.division
        self._idle: dict[int, dict[int, None]] = {}
        self._counts: list[int] = []
        for worker in self.active:
            self.mark_idle(worker)

    def __contains__(self, worker: int) -> bool:
        return self._position[worker] >= 0

    def add(self, worker: int) -> None:
        """Add an idle worker, with the counter of the fastest."""
        self.requests[worker] = max((self.requests[other] for other in self.active), default=0)
        self._position[worker] = len(self.active)
        self.active.append(worker)
        self.mark_idle(worker)

    def remove(self, worker: int) -> None:
        """Remove an active worker."""
        last = self.active.pop()
        if last != worker:
            self.active[self._position[worker]] = last
            self._position[last] = self._position[worker]
        self._position[worker] = -1
        self.mark_busy(worker)

    def mark_idle(self, worker: int) -> None:
        """Mark a worker as in no group."""
        if self._tracks_idle:
            count = self.requests[worker]
            if count not in self._idle:
                self._idle[count] = {}
                insort(self._counts, count)
            self._idle[count][worker] = None

    def mark_busy(self, worker: int) -> None:
        """Mark a worker as in a group."""
        count = self.requests[worker]
        equals = self._idle.get(count)
        if equals is not None and worker in equals:
            del equals[worker]
            if not equals:
                del self._idle[count]
                del self._counts[bisect_left(self._counts, count)]

    def count_request(self, worker: int) -> None:
        """Count a request of a worker that is not idle."""
        self.requests[worker] += 1
        if self.requests[worker] == self.rules.forget:
            self._halve()

    @property
    def fastest(self) -> int:
        """The worker with most requests; takes linear time."""
        return max(self.active, key=self.requests.__getitem__)

    def min_requests(self, initiator: int) -> int:
        """Return the requests that a worker needs to pass the slowdown filter of ``initiator``."""
        threshold = self.rules.threshold
        return 0 if threshold is None else self.requests[initiator] - threshold + 1

    def take_idle(self, initiator: int) -> list[int]:
        """Return ``initiator`` and all idle workers that pass its filter, shuffled; mark them busy.

        See section 5.1, and 5.3 for the filter.
        """
        first = bisect_left(self._counts, self.min_requests(initiator))
        taken = [initiator]
        for count in self._counts[first:]:
            taken += self._idle.pop(count)
        del self._counts[first:]
        shuffle(taken, self.rng)
        return taken

    def _halve(self) -> None:
        self.requests = [count // 2 for count in self.requests]
        idle = [worker for equals in self._idle.values() for worker in equals]
        self._idle, self._counts = {}, []
        for worker in idle:
            self.mark_idle(worker)


class Connectivity:
    """Whether the groups made so far connect all active workers. A union-find structure.

    A division takes idle workers only, and workers that send requests at the same time are idle at
    the same time. Without a bound, two sets of workers could therefore stay unconnected forever.
    """

    def __init__(self, workers: int, steps: int | None) -> None:
        self._workers, self._steps = workers, steps
        self._parent: list[int] = []
        self._components, self._requests, self._max_requests = 0, 0, 0
        self.reset(workers)

    def reset(self, active: int) -> None:
        """Start again, with ``active`` unconnected workers."""
        self._parent = list(range(self._workers))
        self._components, self._requests = active, 0
        self._max_requests = active * active.bit_length() * (self._steps or 0)

    def count_request(self) -> bool:
        """Count a request; return whether all workers should be connected by now."""
        self._requests += 1
        return self._steps is not None and self._requests > self._max_requests

    def add_group(self, members: Iterable[int], active: int) -> None:
        """Connect members; reset if that connects all ``active`` workers."""
        if self._steps is None:
            return
        first = -1
        for member in members:
            root = self._root(member)
            if first < 0:
                first = root
            elif root != first:
                self._parent[root] = first
                self._components -= 1
        if self._components <= 1:
            self.reset(active)

    def find_unconnected(self, worker: int, pool: WorkerPool) -> int | None:
        """Return a random worker of another component that passes the filter of ``worker``.

        None if a bounded number of draws finds none; the next request draws again.
        """
        root, floor = self._root(worker), pool.min_requests(worker)
        draw, active = pool.rng.random, pool.active
        for _ in range(_BRIDGE_DRAWS):
            other = active[int(draw() * len(active))]
            if pool.requests[other] >= floor and self._root(other) != root:
                return other
        return None

    def _root(self, worker: int) -> int:
        parent = self._parent
        while parent[worker] != worker:
            parent[worker] = parent[parent[worker]]
            worker = parent[worker]
        return worker


Policy: TypeAlias = Callable[[int, WorkerPool], list[list[int]]]


def policy_of(rules: Rules) -> Policy:
    """Return the policy that ``rules`` select."""
    if rules.whole:
        return everyone
    if rules.inter_intra:
        return inter_and_intra
    return division if rules.division else random_group


def everyone(initiator: int, pool: WorkerPool) -> list[list[int]]:
    """Make one group of all active workers, even if they are in other groups."""
    assert initiator in pool, "the initiator is active"
    return [list(pool.active)]


def random_group(initiator: int, pool: WorkerPool) -> list[list[int]]:
    """Make one group of the initiator and random workers, even if they are in other groups (4.1).

    With a filter the group may be smaller, if too few fast workers are found.
    """
    active, draw = pool.active, pool.rng.random
    group, floor = [initiator], pool.min_requests(initiator)
    size = min(pool.rules.size, len(active))
    if pool.rules.threshold is None:
        # The sample has one worker more than needed, because it may contain the initiator.
        drawn = pool.rng.sample(active, size)
        return [group + [worker for worker in drawn if worker != initiator][: size - 1]]
    for _ in range(_MEMBER_DRAWS * size):
        if len(group) == size:
            break
        worker = active[int(draw() * len(active))]
        if worker not in group and pool.requests[worker] >= floor:
            group.append(worker)
    return [group]


def division(initiator: int, pool: WorkerPool) -> list[list[int]]:
    """Divide all idle workers into groups (section 5.1)."""
    return split_evenly(pool.take_idle(initiator), pool.rules.size)


def inter_and_intra(initiator: int, pool: WorkerPool) -> list[list[int]]:
    """Give each idle worker two groups (section 5.2).

    First a random idle worker of each host, its head, is in a group of heads, and the others are in
    groups within their host. Then all idle workers of a host are in one group. A worker without
    partners gets a group of its own, so it needs as many steps to its second group as the others.
    With ``rules.filter_intra`` a worker that fails the fastest worker's filter is alone in its
    second group.
    """
    host_of, size = pool.layout.host_of, pool.rules.size
    hosts: dict[int, list[int]] = {}
    for worker in pool.take_idle(initiator):
        hosts.setdefault(host_of[worker], []).append(worker)
    heads = [local[0] for local in hosts.values()]
    # Hosts with many workers tend to come first.
    shuffle(heads, pool.rng)
    groups = split_evenly(heads, size)
    for local in hosts.values():
        groups += split_evenly(local[1:], size)
    floor = pool.min_requests(pool.fastest) if pool.rules.filter_intra else 0
    for local in hosts.values():
        groups += isolate_slow(local, pool.requests, floor)
    return groups


def isolate_slow(workers: Sequence[int], requests: Sequence[int], floor: int) -> list[list[int]]:
    """Return one group of the workers with ``floor`` requests, and one group per slower worker.

    A second group waits for its members' next steps. A slow member would slow down the others,
    which would then fail the filter themselves. The paper filters first groups only.

    >>> isolate_slow([0, 1, 2], requests=[9, 2, 8], floor=6)
    [[0, 2], [1]]
    """
    fast = [worker for worker in workers if requests[worker] >= floor]
    slow = [[worker] for worker in workers if requests[worker] < floor]
    return [fast, *slow] if fast else slow


def split_evenly(workers: Sequence[int], size: int) -> list[list[int]]:
    """Split into parts of about ``size`` that differ by one at most; avoids parts of one worker.

    >>> [len(part) for part in split_evenly(range(8), 3)]
    [3, 3, 2]
    >>> [len(part) for part in split_evenly(range(7), 3)]
    [4, 3]
    """
    n = len(workers)
    if not n:
        return []
    number = max(1, (n + (size - 1) // 2) // size)
    short, longer = divmod(n, number)
    out, start = [], 0
    for part in range(number):
        stop = start + short + (part < longer)
        out.append(list(workers[start:stop]))
        start = stop
    return out


def shuffle(items: list[int], rng: Random) -> None:
    """Shuffle in place, three times as fast as ``Random.shuffle``."""
    draw = rng.random
    for i in range(len(items) - 1, 0, -1):
        j = int(draw() * (i + 1))
        items[i], items[j] = items[j], items[i]
