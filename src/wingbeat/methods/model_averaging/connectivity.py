"""Whether the groups that were made connect all workers, and who is still apart."""

from __future__ import annotations

from collections.abc import Iterable

from wingbeat.methods.model_averaging.crowd import Crowd

_DRAWS = 16
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
        for _ in range(_DRAWS):
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
