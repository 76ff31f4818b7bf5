"""Which groups' connections are kept for the next time, as all members agree. Pure.

The paper keeps NCCL communicators until there are 64, and then makes one for each average
(section 6.1). Here each worker keeps those of the groups that it was in last; the generator, which
knows them all, decides which go, and every member hears of that before it has to open another.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from wingbeat.errors import UsageError

CAPACITY = 16
"""Groups whose connections a worker keeps."""

_Key = tuple[int, ...]


class Rooms:
    """Numbers the meetings of groups: members whose connections are kept have the same number.

    Args:
        workers: how many there are.
        capacity: groups whose connections a worker keeps.

    Raises:
        UsageError: they could keep none.
    """

    def __init__(self, workers: int, capacity: int = CAPACITY) -> None:
        if capacity < 1:
            raise UsageError(f"Rooms(capacity={capacity}): allowed are 1 group a worker and more")
        self._capacity = capacity
        self._of: list[OrderedDict[_Key, None]] = [OrderedDict() for _ in range(workers)]
        self._numbers: dict[_Key, int] = {}
        self._closed: list[list[int]] = [[] for _ in range(workers)]
        self._made = 0

    def meeting(self, members: Sequence[int]) -> int:
        """Return the number of the members' meeting, from 1 on; a new one if none is kept.

        Then the one that was used longest ago is closed of each member that has too many.
        """
        key = tuple(sorted(members))
        if key not in self._numbers:
            for member in key:
                if len(self._of[member]) >= self._capacity:
                    self._close(next(iter(self._of[member])))
            self._made += 1
            self._numbers[key] = self._made
        for member in key:
            self._of[member][key] = None
            self._of[member].move_to_end(key)
        return self._numbers[key]

    def once(self) -> int:
        """Return the number of a meeting whose connections nobody keeps."""
        self._made += 1
        return self._made

    def gone(self, worker: int) -> None:
        """Close all meetings of a worker: connections to it may be broken."""
        for key in list(self._of[worker]):
            self._close(key)

    def closed(self, worker: int) -> list[int]:
        """Return the meetings that ``worker`` is to close before it opens another; once."""
        numbers, self._closed[worker] = self._closed[worker], []
        return numbers

    def _close(self, key: _Key) -> None:
        number = self._numbers.pop(key)
        for member in key:
            del self._of[member][key]
            self._closed[member].append(number)
