"""Who leads to whom, where not all workers are joined directly, as in a BCube. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence


class Paths:
    """The shortest ways between workers that live.

    Args:
        joined: by worker, those that one of its interfaces reaches; None if all reach all, as long
            as nothing is cut.
        me: who asks.
    """

    def __init__(self, joined: Sequence[Collection[int]] | None, me: int) -> None:
        self._joined, self._me = joined, me
        self._gone: set[int] = set()
        self._known: dict[int, dict[int, int]] = {}

    @property
    def relays(self) -> bool:
        """Whether some are reached over others alone."""
        return self._joined is not None

    def without(self, worker: int) -> None:
        """Lead over this worker no more."""
        self._gone.add(worker)
        self._known.clear()

    def again(self, worker: int) -> None:
        """Lead over it again."""
        self._gone.discard(worker)
        self._known.clear()

    def next(self, to: int, neighbours: Collection[int]) -> list[int]:
        """Return those of ``neighbours`` from which the fewest hops lead to ``to``; maybe none.

        Args:
            to: a worker.
            neighbours: those that this worker reaches now.
        """
        if to in neighbours:
            return [to]
        if self._joined is None:  # whoever is reached may reach it over another interface
            return list(neighbours)
        hops = self._known.get(to)
        if hops is None:
            hops = self._known[to] = self._hops(to, self._joined)
        least = min((hops[n] for n in neighbours if n in hops), default=-1)
        return [n for n in neighbours if hops.get(n, -2) == least]

    def _hops(self, to: int, joined: Sequence[Collection[int]]) -> dict[int, int]:
        """Return how many hops each worker is from ``to``, without this one."""
        out, queue = {to: 0}, deque([to])
        while queue:
            at = queue.popleft()
            for worker in joined[at]:
                if worker not in out and worker not in self._gone and worker != self._me:
                    out[worker] = out[at] + 1
                    queue.append(worker)
        return out
