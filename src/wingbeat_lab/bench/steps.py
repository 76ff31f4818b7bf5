"""Count the steps of workers that do not wait for each other, in a shared file.

A bench's workers are processes of one machine. Counting needs no message, so it adds no traffic to
the lab's links and no wait to a worker.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from wingbeat.errors import WingbeatError

ROOM = 100_000
"""Maximum number of steps of a worker; the file is sparse."""

_BYTES = 8


class SharedSteps:
    """When each worker has made each of its steps.

    The first worker creates the file at ``path``. A worker may make up to ``room`` steps.
    """

    def __init__(self, path: Path, rank: int, workers: int, room: int = ROOM) -> None:
        self._rank, self._workers, self._room = rank, workers, room
        size = workers * (1 + room) * _BYTES
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(handle, size)  # existing content stays, new bytes are 0
            self._map = mmap.mmap(handle, size)
        finally:
            os.close(handle)
        self._cells = memoryview(self._map).cast("d")

    def add(self, now: float) -> None:
        """Count a step of this worker that ended at ``now``, in seconds of the monotonic clock.

        WingbeatError if the maximum is exceeded.
        """
        count = int(self._cells[self._rank * (1 + self._room)])
        if count == self._room:
            raise WingbeatError(
                f"rank {self._rank} has made {count} steps in one turn; a bench counts up to "
                f"{self._room}: ask for fewer iterations or more rounds"
            )
        # Each worker writes only its own part, and the time before the count.
        self._cells[self._rank * (1 + self._room) + 1 + count] = now
        self._cells[self._rank * (1 + self._room)] = count + 1

    def by_rank(self) -> list[int]:
        """Return the number of steps of each worker."""
        return [int(self._cells[rank * (1 + self._room)]) for rank in range(self._workers)]

    def total(self) -> int:
        """Return the number of steps of all workers."""
        return sum(self.by_rank())

    def made(self) -> list[tuple[float, int]]:
        """Return when each step ended and its worker, in this order."""
        found = []
        for rank, count in enumerate(self.by_rank()):
            first = rank * (1 + self._room) + 1
            found += [(now, rank) for now in self._cells[first : first + count]]
        return sorted(found)

    def close(self) -> None:
        """Close the file."""
        self._cells.release()
        self._map.close()


def iterations(
    made: list[tuple[float, int]], workers: int, *, before: int, count: int, begin: float
) -> tuple[list[float], list[int]]:
    """Split steps into iterations: each has as many steps as there are workers, of any of them.

    ``begin`` is when the first one began, if ``before`` is 0. Returns when the previous iteration
    and each iteration ended; and the steps of each worker in them.

    >>> iterations([(1.0, 0), (1.5, 1), (2.0, 0), (3.0, 0)], 2, before=1, count=1, begin=0.0)
    ([1.5, 3.0], [2, 0])
    """
    last = [workers * (before + number) - 1 for number in range(count + 1)]
    ends = [begin if index < 0 else made[index][0] for index in last]
    inside = [rank for _, rank in made[workers * before : workers * (before + count)]]
    return ends, [inside.count(rank) for rank in range(workers)]
