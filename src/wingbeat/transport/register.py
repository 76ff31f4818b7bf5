"""Which groups a process has open, and which epochs it has had."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

from wingbeat.errors import UsageError
from wingbeat.types import Group

MAX_OPEN = 64
"""Groups open at once in a process. Each may occupy a thread and the connections to its members."""

REMEMBERED = 4096
"""Sets of ranks whose last epoch is remembered, those used last."""


class Register:
    """Admits groups and keeps count of them; any thread may ask."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._open: set[Group] = set()
        self._last: OrderedDict[tuple[int, tuple[int, ...]], int] = OrderedDict()

    def admit(self, group: Any, rank: int, size: int) -> None:
        """Count ``group`` as open in the process of ``rank``, one of ``size``.

        Raises:
            UsageError: it is no group, has members that do not exist, or has not this rank; this
                epoch of it is over; or too many are open.
        """
        if not isinstance(group, Group):
            raise UsageError(f"open_group({group!r}): allowed is a wingbeat.Group(ranks, epoch)")
        if group.ranks[-1] >= size:
            raise UsageError(
                f"{group}: rank {group.ranks[-1]} does not exist: ranks are 0 to {size - 1}"
            )
        if rank not in group.ranks:
            raise UsageError(
                f"{group}: opened by rank {rank}, which is no member: only members may open it"
            )
        with self._changing:
            key = group.series, group.ranks
            last = self._last.get(key, -1)
            if group.epoch <= last:
                raise UsageError(
                    f"{group}: rank {rank} has opened epoch {last} of these ranks before: give "
                    f"each epoch once, and the next one {last + 1} or higher"
                )
            if len(self._open) >= MAX_OPEN:
                raise UsageError(
                    f"{group}: rank {rank} has {MAX_OPEN} groups open, which is as many as there "
                    "may be: close some (`with world.open_group(group) as members:` does)"
                )
            self._open.add(group)
            self._last[key] = group.epoch
            self._last.move_to_end(key)
            if len(self._last) > REMEMBERED:
                self._last.popitem(last=False)

    def leave(self, group: Group) -> None:
        """Count ``group`` as closed."""
        with self._changing:
            self._open.discard(group)
