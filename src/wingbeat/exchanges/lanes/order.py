"""The two ends of a lane: numbering, retransmission and reordering. Pure.

Parts that travel over several interfaces, or again after a cut, arrive in any order; bounded
staleness requires that each worker's messages arrive in order and once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

WINDOW = 64
"""How far a number may be ahead of the oldest unacknowledged one."""

_WORD = 1 << 32

T = TypeVar("T")


class ProtocolError(Exception):
    """A number that no sender of this job gives; says why."""


def unwrap(low: int, near: int) -> int:
    """Return the number closest to ``near`` whose lowest 32 bits are ``low``.

    >>> unwrap(1, 2**32 - 1) - 2**32
    1
    """
    return near + (low - near + _WORD // 2) % _WORD - _WORD // 2


class ReorderBuffer(Generic[T]):
    """The receiver's end.

    Attributes:
        next: the next number in order; all before it were returned.
        unacknowledged: items received since `acknowledged`, duplicates included.
    """

    def __init__(self) -> None:
        self.next = 0
        self.unacknowledged = 0
        self._early: dict[int, T] = {}

    def take(self, low: int, item: T) -> Iterator[T]:
        """Add an item, and return all items that are in order now.

        Args:
            low: the lowest 32 bits of its number.
            item: the item.

        Raises:
            ProtocolError: it is beyond the window; so memory is bounded.
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
        """Return the lowest 32 bits of `next`, which is sent as acknowledgement."""
        self.unacknowledged = 0
        return self.next % _WORD


class RetransmitBuffer(Generic[T]):
    """The sender's end.

    Attributes:
        next: the number of the next item.
    """

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
        """Keep an item; return the lowest 32 bits of its number."""
        self._kept.append(item)
        self.next += 1
        return (self.next - 1) % _WORD

    def acknowledge(self, low: int) -> bool:
        """Process an acknowledgement of all items before a number; return whether it was new.

        Raises:
            ProtocolError: so many were never sent.
        """
        oldest = self.next - len(self._kept)
        number = unwrap(low, oldest)
        if number > self.next:
            raise ProtocolError(f"{number} items were acknowledged, but only {self.next} were sent")
        for _ in range(oldest, number):
            self._kept.popleft()
        return number > oldest
