"""Who takes part, who is idle and who is slow: what a policy chooses from."""

from __future__ import annotations

from bisect import bisect_left, insort
from random import Random

from wingbeat.methods.model_averaging.layout import Layout
from wingbeat.methods.model_averaging.rules import Rules


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
