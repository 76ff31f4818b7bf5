"""Which groups are made when a worker asks and is in none (Ripples, sections 4.1, 5.1 and 5.2)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from random import Random
from typing import Protocol

from wingbeat.methods.model_averaging.rules import Layout, Rules


class Crowd:
    """Workers as the generator knows them. Every call takes a time that does not grow with them.

    `idle_for` apart, whose time grows with those it returns, and `fastest`; and once in
    ``rules.forget`` requests of the fastest worker all counters are halved.

    Attributes:
        layout: which worker is on which host.
        rules: the options.
        chance: all choices are made by it.
        here: the workers that take part, in no order.
        asked: of each worker, how often it has asked; halved at times.
    """

    def __init__(self, layout: Layout, rules: Rules, chance: Random) -> None:
        self.layout, self.rules, self.chance = layout, rules, chance
        self.here = list(range(layout.workers))
        self.asked = [0] * layout.workers
        self._place = list(range(layout.workers))
        # Idle workers by how often they have asked, so that a division need not look at those that
        # the filter leaves out. Nobody asks for them without divisions.
        self._kept = rules.division
        self._idle: dict[int, dict[int, None]] = {}
        self._counts: list[int] = []
        for worker in self.here:
            self.rest(worker)

    def __contains__(self, worker: int) -> bool:
        return self._place[worker] >= 0

    def enter(self, worker: int) -> None:
        """Let an idle worker take part, as one that is as fast as the fastest."""
        self.asked[worker] = max((self.asked[other] for other in self.here), default=0)
        self._place[worker] = len(self.here)
        self.here.append(worker)
        self.rest(worker)

    def leave(self, worker: int) -> None:
        """Let a worker take part no more."""
        last = self.here.pop()
        if last != worker:
            self.here[self._place[worker]] = last
            self._place[last] = self._place[worker]
        self._place[worker] = -1
        self.busy(worker)

    def rest(self, worker: int) -> None:
        """Have ``worker`` be idle: it is in no group."""
        if self._kept:
            count = self.asked[worker]
            if count not in self._idle:
                self._idle[count] = {}
                insort(self._counts, count)
            self._idle[count][worker] = None

    def busy(self, worker: int) -> None:
        """Have ``worker`` not be idle, if it is."""
        count = self.asked[worker]
        alike = self._idle.get(count)
        if alike is not None and worker in alike:
            del alike[worker]
            if not alike:
                del self._idle[count]
                del self._counts[bisect_left(self._counts, count)]

    def count(self, worker: int) -> None:
        """Count a request of ``worker``, which is not idle."""
        self.asked[worker] += 1
        if self.asked[worker] == self.rules.forget:
            self._halve()

    @property
    def fastest(self) -> int:
        """The worker that has asked most often; takes a time that grows with the workers."""
        return max(self.here, key=self.asked.__getitem__)

    def floor(self, initiator: int) -> int:
        """Return how often one must have asked to be fast enough for ``initiator``'s group."""
        threshold = self.rules.threshold
        return 0 if threshold is None else self.asked[initiator] - threshold + 1

    def idle_for(self, initiator: int) -> list[int]:
        """Return ``initiator`` and all that are idle and fast enough for it, in random order.

        They are not idle any more (section 5.1, and the filter of 5.3).
        """
        first = bisect_left(self._counts, self.floor(initiator))
        taken = [initiator]
        for count in self._counts[first:]:
            taken += self._idle.pop(count)
        del self._counts[first:]
        shuffle(taken, self.chance)
        return taken

    def _halve(self) -> None:
        self.asked = [count // 2 for count in self.asked]
        idle = [worker for alike in self._idle.values() for worker in alike]
        self._idle, self._counts = {}, []
        for worker in idle:
            self.rest(worker)


def shuffle(items: list[int], chance: Random) -> None:
    """Shuffle in place; a third of the time of ``Random.shuffle``."""
    draw = chance.random
    for i in range(len(items) - 1, 0, -1):
        j = int(draw() * (i + 1))
        items[i], items[j] = items[j], items[i]


_BRIDGE_DRAWS = 16
"""How many workers are looked at."""


class Connection:
    """Groups joined, since they last connected all that take part.

    A division is of idle workers alone, and workers that ask at the same time are idle at the same
    time: so parts of a cluster may go on without each other for ever.

    Args:
        workers: how many there are.
        steps: requests of each worker, times the bits of their number, in which all are to be
            connected; None if nobody cares.
    """

    def __init__(self, workers: int, steps: int | None) -> None:
        self._workers, self._steps = workers, steps
        self._parent: list[int] = []
        self._parts, self._asked, self._most = 0, 0, 0
        self.begin(workers)

    def begin(self, here: int) -> None:
        """Begin anew, with so many workers taking part."""
        self._parent = list(range(self._workers))
        self._parts, self._asked = here, 0
        self._most = here * here.bit_length() * (self._steps or 0)

    def asked(self) -> bool:
        """Count a request; whether the workers ought to be connected by now."""
        self._asked += 1
        return self._steps is not None and self._asked > self._most

    def join(self, members: Iterable[int], here: int) -> None:
        """Take in a group, of ``here`` workers that take part; begin anew if that connects all."""
        if self._steps is None:
            return
        first = -1
        for member in members:
            root = self._root(member)
            if first < 0:
                first = root
            elif root != first:
                self._parent[root] = first
                self._parts -= 1
        if self._parts <= 1:
            self.begin(here)

    def other(self, worker: int, crowd: Crowd) -> int | None:
        """Return a random worker of another part than ``worker``'s, fast enough for it.

        None if none was found: of many workers only some are looked at, as one that is too slow may
        be apart for long. The next request looks at others.
        """
        mine, floor = self._root(worker), crowd.floor(worker)
        draw, here = crowd.chance.random, crowd.here
        for _ in range(_BRIDGE_DRAWS):
            other = here[int(draw() * len(here))]
            if crowd.asked[other] >= floor and self._root(other) != mine:
                return other
        return None

    def _root(self, worker: int) -> int:
        parent = self._parent
        while parent[worker] != worker:
            parent[worker] = parent[parent[worker]]
            worker = parent[worker]
        return worker


class Policy(Protocol):
    """Makes groups."""

    def __call__(self, initiator: int, crowd: Crowd) -> list[list[int]]:
        """Return the groups to run for a request, in the order in which they are to run.

        Args:
            initiator: the worker that has asked, who is in one of them at least.
            crowd: whom they are chosen from; each group's members take part.
        """
        ...


def of_rules(rules: Rules) -> Policy:
    """Return the policy that ``rules`` name."""
    if rules.whole:
        return everyone
    if rules.inter_intra:
        return inter_and_intra
    return division if rules.division else one_at_random


def everyone(initiator: int, crowd: Crowd) -> list[list[int]]:
    """Make one group of all, whatever they are in."""
    assert initiator in crowd, "who asks takes part"
    return [list(crowd.here)]


def one_at_random(initiator: int, crowd: Crowd) -> list[list[int]]:
    """Make one group of the initiator and random others, whatever they are in (section 4.1)."""
    here, draw = crowd.here, crowd.chance.random
    group, floor = [initiator], crowd.floor(initiator)
    size = min(crowd.rules.size, len(here))
    if crowd.rules.threshold is None:
        # One more than is needed, as the initiator may be among them.
        drawn = crowd.chance.sample(here, size)
        return [group + [worker for worker in drawn if worker != initiator][: size - 1]]
    # So few may be fast enough that they are not found; then the group is smaller.
    for _ in range(_DRAWS * size):
        if len(group) == size:
            break
        worker = here[int(draw() * len(here))]
        if worker not in group and crowd.asked[worker] >= floor:
            group.append(worker)
    return [group]


_DRAWS = 8
"""How often a member is drawn until one is fast enough and not drawn yet."""


def division(initiator: int, crowd: Crowd) -> list[list[int]]:
    """Divide all idle workers into groups (section 5.1)."""
    return parts(crowd.idle_for(initiator), crowd.rules.size)


def inter_and_intra(initiator: int, crowd: Crowd) -> list[list[int]]:
    """Give each idle worker two groups (section 5.2).

    A random worker of each host, its head, is in a group of heads, and the others are in groups
    within their host; then all of a host are in one. Only workers that are idle count in any of
    this. Whoever has no partner gets a group of its own, so that it is as many steps away from the
    second group as the others are. With ``rules.filter_intra``, who is too slow for the fastest
    worker's groups is in no second group with others.
    """
    host_of, size = crowd.layout.host_of, crowd.rules.size
    hosts: dict[int, list[int]] = {}
    for worker in crowd.idle_for(initiator):
        hosts.setdefault(host_of[worker], []).append(worker)
    heads = [local[0] for local in hosts.values()]
    # A host with many workers is likely to come first.
    shuffle(heads, crowd.chance)
    groups = parts(heads, size)
    for local in hosts.values():
        groups += parts(local[1:], size)
    floor = crowd.floor(crowd.fastest) if crowd.rules.filter_intra else 0
    for local in hosts.values():
        groups += of_like_speed(local, crowd.asked, floor)
    return groups


def of_like_speed(workers: Sequence[int], asked: Sequence[int], floor: int) -> list[list[int]]:
    """Divide a host's workers into those that have asked so often, and each other one by itself.

    A second group waits for its members' next steps: in one with a slow worker, the others would
    make as few as it does, and then count as slow too. The paper filters first groups alone.

    >>> of_like_speed([0, 1, 2], asked=[9, 2, 8], floor=6)
    [[0, 2], [1]]
    """
    fast = [worker for worker in workers if asked[worker] >= floor]
    alone = [[worker] for worker in workers if asked[worker] < floor]
    return [fast, *alone] if fast else alone


def parts(workers: Sequence[int], size: int) -> list[list[int]]:
    """Cut into parts of about ``size``, as equal as can be; none has one worker if avoidable.

    >>> [len(part) for part in parts(range(8), 3)], [len(part) for part in parts(range(7), 3)]
    ([3, 3, 2], [4, 3])
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
