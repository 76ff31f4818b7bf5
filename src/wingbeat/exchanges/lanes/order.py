"""The two ends of a lane: numbering, retransmission and reordering. Pure.

Parts that travel over several interfaces, or are retransmitted, arrive in any order. Bounded
staleness requires that each worker's messages are delivered once and in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

WINDOW = 64
"""Maximum distance of a number from the oldest unacknowledged one."""

_WORD = 1 << 32

T = TypeVar("T")


class ProtocolError(Exception):
    """A number that no sender of this job uses."""


def unwrap(low: int, near: int) -> int:
    """Return the number closest to ``near`` whose lowest 32 bits are ``low``.

    >>> unwrap(1, 2**32 - 1) - 2**32
    1
    """
    return near + (low - near + _WORD // 2) % _WORD - _WORD // 2


class ReorderBuffer(Generic[T]):
    """The receiver's end.

    ``next`` is the next number in order. ``unacknowledged`` counts the items received since
    `acknowledged`, duplicates included.
    """

    def __init__(self) -> None:
        self.next = 0
        self.unacknowledged = 0
        self._early: dict[int, T] = {}

    def take(self, low: int, item: T) -> Iterator[T]:
        """Add an item by the lowest 32 bits of its number; return all items now in order.

        A `ProtocolError` if the number is beyond the window, which bounds the memory.
        """
        number = unwrap(low, self.next)
        if number >= self.next + WINDOW:
            raise ProtocolError(f"number {number} is beyond the window at {self.next}")
        self.unacknowledged += 1
        if number >= self.next:
            self._early.setdefault(number, item)
        return self._due()

    def _due(self) -> Iterator[T]:
        while self.next in self._early:
            item = self._early.pop(self.next)
            self.next += 1
            yield item

    def acknowledged(self) -> int:
        """Return the lowest 32 bits of `next`, to be sent as acknowledgement."""
        self.unacknowledged = 0
        return self.next % _WORD


class RetransmitBuffer(Generic[T]):
    """The sender's end; ``next`` is the number of the next item."""

    def __init__(self) -> None:
        self.next = 0
        self._kept: deque[T] = deque()

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[T]:
        """Yield the unacknowledged items, oldest first."""
        return iter(self._kept)

    @property
    def open(self) -> bool:
        """Whether the window has room for another item."""
        return len(self._kept) < WINDOW

    def add(self, item: T) -> int:
        """Store an item; return the lowest 32 bits of its number."""
        self._kept.append(item)
        self.next += 1
        return (self.next - 1) % _WORD

    def acknowledge(self, low: int) -> bool:
        """Process an acknowledgement of all items before a number; return whether it was new.

        A `ProtocolError` if the items were never sent.
        """
        oldest = self.next - len(self._kept)
        number = unwrap(low, oldest)
        if number > self.next:
            raise ProtocolError(f"{number} items were acknowledged, but only {self.next} were sent")
        for _ in range(oldest, number):
            self._kept.popleft()
        return number > oldest
