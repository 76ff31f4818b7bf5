"""Steps of all workers where none waits for all: counted in a file that they have in common.

A bench's workers are processes of one machine, so a step is counted without a message: none of the
lab's links carries it, and no worker waits to be counted.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from wingbeat.errors import WingbeatError

ROOM = 100_000
"""Steps of a worker that can be counted; the file has no more blocks on disk than steps need."""

_BYTES = 8


class SharedSteps:
    """When each worker has made each of its steps.

    Args:
        path: of the file, the same for all workers; it is made by the first.
        rank: this worker.
        workers: in all.
        room: steps of a worker that can be counted.
    """

    def __init__(self, path: Path, rank: int, workers: int, room: int = ROOM) -> None:
        self._rank, self._workers, self._room = rank, workers, room
        size = workers * (1 + room) * _BYTES
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(handle, size)  # what is there stays, what is new is 0
            self._map = mmap.mmap(handle, size)
        finally:
            os.close(handle)
        self._cells = memoryview(self._map).cast("d")

    def add(self, now: float) -> None:
        """Count a step of this worker.

        Args:
            now: when it was over: seconds of the machine's monotonic clock, one for all workers.

        Raises:
            WingbeatError: there were too many.
        """
        count = int(self._cells[self._rank * (1 + self._room)])
        if count == self._room:
            raise WingbeatError(
                f"rank {self._rank} has made {count} steps in one turn; a bench counts up to "
                f"{self._room}: ask for fewer iterations or more rounds"
            )
        # Each worker writes in its own part alone. The time stands there before it counts.
        self._cells[self._rank * (1 + self._room) + 1 + count] = now
        self._cells[self._rank * (1 + self._room)] = count + 1

    def by_rank(self) -> list[int]:
        """Return how many steps each worker has made."""
        return [int(self._cells[rank * (1 + self._room)]) for rank in range(self._workers)]

    def total(self) -> int:
        """Return how many steps all workers have made."""
        return sum(self.by_rank())

    def made(self) -> list[tuple[float, int]]:
        """Return when each step was over and who made it, in this order."""
        found = []
        for rank, count in enumerate(self.by_rank()):
            first = rank * (1 + self._room) + 1
            found += [(now, rank) for now in self._cells[first : first + count]]
        return sorted(found)

    def close(self) -> None:
        """Let go of the file."""
        self._cells.release()
        self._map.close()


def iterations(
    made: list[tuple[float, int]], workers: int, *, before: int, count: int, begin: float
) -> tuple[list[float], list[int]]:
    """Cut steps into iterations: each is as many steps as there are workers, whoever made them.

    Args:
        made: as of `SharedSteps.made`.
        workers: in all.
        before: iterations before the first one.
        count: how many there are.
        begin: when the first one began, if there were none before.

    Returns:
        When the one before them was over, and each of them; and how many steps each worker has
        made in them.

    >>> iterations([(1.0, 0), (1.5, 1), (2.0, 0), (3.0, 0)], 2, before=1, count=1, begin=0.0)
    ([1.5, 3.0], [2, 0])
    """
    last = [workers * (before + number) - 1 for number in range(count + 1)]
    ends = [begin if index < 0 else made[index][0] for index in last]
    inside = [rank for _, rank in made[workers * before : workers * (before + count)]]
    return ends, [inside.count(rank) for rank in range(workers)]
