"""The rounds of a piece that this worker owns: what is summed with what (Canary, section 4.4.2).

The owner alone says which contributions a round has, so every worker adds the same sums in the
same order, and all hold the same bits, whatever came when. A round is closed when each worker has
sent its piece for it or has said that it has nothing yet; what comes later joins a later round.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from wingbeat.methods.bounded_staleness.messages import Entry


class Owned:
    """What has come of one piece of all colayers.

    Args:
        workers: how many there may be.
        colayers: k.
        first: number of the first round to be closed.
    """

    def __init__(self, workers: int, colayers: int, first: int) -> None:
        self.next = [first] * colayers
        self._waiting: list[dict[Entry, Any]] = [{} for _ in range(colayers)]
        self._said = [[-1] * workers for _ in range(colayers)]
        self._changed = set(range(colayers))  # those of which somebody has said more, or is gone
        self._members: tuple[int, ...] = ()

    def add(self, worker: int, iteration: int, colayer: int, payload: Any) -> None:
        """Take in a contribution; it answers for the round of its iteration."""
        self._waiting[colayer][iteration, worker] = payload
        self._hear(colayer, worker, iteration)

    def said(self, worker: int, number: int) -> None:
        """Note that the worker has sent all that it has for rounds up to ``number``."""
        for colayer in range(len(self.next)):
            self._hear(colayer, worker, number)

    def _hear(self, colayer: int, worker: int, number: int) -> None:
        said = self._said[colayer]
        if number > said[worker]:
            said[worker] = number
            self._changed.add(colayer)

    def forget(self, worker: int) -> None:
        """Drop what waits of a worker whose life is over, and what it has said."""
        for waiting, said in zip(self._waiting, self._said, strict=True):
            for entry in [entry for entry in waiting if entry[1] == worker]:
                del waiting[entry]
            said[worker] = -1

    def first(self, colayer: int, worker: int, at: int) -> int:
        """Return the earliest iteration of a worker at ``at`` that later rounds may still have."""
        waiting = (iteration for iteration, who in self._waiting[colayer] if who == worker)
        return min(waiting, default=at)

    def close(self, members: Iterable[int]) -> Iterator[tuple[int, int, dict[Entry, Any]]]:
        """Yield colayer, number and what is to be summed of each round that is closed now.

        Contributions are in the order of iterations, then of workers: so the same ones give the
        same bits, and all of one iteration the synchronous sum. Those of a
        later iteration than the round's wait for theirs.

        Args:
            members: the workers that must have answered.
        """
        members = tuple(members)
        if members != self._members:
            self._members = members
            self._changed.update(range(len(self.next)))
        changed, self._changed = sorted(self._changed), set()
        for colayer in changed:
            said = self._said[colayer]
            limit = min(said[worker] for worker in members)
            while self.next[colayer] <= limit:
                number = self.next[colayer]
                self.next[colayer] += 1
                waiting = self._waiting[colayer]
                due = sorted(entry for entry in waiting if entry[0] <= number)
                yield colayer, number, {entry: waiting.pop(entry) for entry in due}


class Ownership:
    """All pieces that this worker owns.

    Args:
        workers: how many there may be.
        colayers: k.
    """

    def __init__(self, workers: int, colayers: int) -> None:
        self._workers, self._colayers = workers, colayers
        self._owned: dict[int, Owned] = {}

    def begin(self, piece: int, first: int) -> None:
        """Own a piece, from round ``first`` on, with nothing waiting."""
        self._owned[piece] = Owned(self._workers, self._colayers, first)

    def leave(self, piece: int) -> None:
        """Own a piece no more."""
        self._owned.pop(piece, None)

    def __iter__(self) -> Iterator[int]:
        return iter(self._owned)

    def __getitem__(self, piece: int) -> Owned:
        return self._owned[piece]

    def said(self, worker: int, number: int) -> None:
        """Note what this worker says of itself."""
        for owned in self._owned.values():
            owned.said(worker, number)

    def forget(self, worker: int) -> None:
        """Drop what waits of a worker whose life is over."""
        for owned in self._owned.values():
            owned.forget(worker)

    def close(self, members: Iterable[int]) -> Iterator[tuple[int, int, int, dict[Entry, Any]]]:
        """Yield piece, colayer, number and contributions of what is closed; see `Owned.close`."""
        for piece, owned in self._owned.items():
            for closed in owned.close(members):
                yield (piece, *closed)
