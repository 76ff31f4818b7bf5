"""The two ends of a lane: messages are numbered, kept until they are told of, and put in order.

Pure. What comes over several interfaces, or a second time because one was cut, comes in any order;
a worker under bounded staleness counts on what another says arriving in its order, once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

AHEAD = 64
"""How far a number may be ahead of the oldest that the receiver has not told of."""

_WORD = 1 << 32

T = TypeVar("T")


class Astray(Exception):
    """A number that no sender of ours gives; says why."""


def whole(low: int, near: int) -> int:
    """Return the number next to ``near`` whose lowest 32 bits are ``low``.

    >>> whole(1, 2**32 - 1) - 2**32
    1
    """
    return near + (low - near + _WORD // 2) % _WORD - _WORD // 2


class Ordered(Generic[T]):
    """The receiver's end.

    Attributes:
        next: the number that is due; all before have been returned.
        untold: how many have come since `told`; what came twice counts, as its sender may not know.
    """

    def __init__(self) -> None:
        self.next = 0
        self.untold = 0
        self._early: dict[int, T] = {}

    def take(self, low: int, item: T) -> Iterator[T]:
        """Take in an item, and return all whose turn it is.

        Args:
            low: the lowest 32 bits of its number.
            item: what has come.

        Raises:
            Astray: it is further ahead than its sender may send; so memory is bounded.
        """
        number = whole(low, self.next)
        if number >= self.next + AHEAD:
            raise Astray(f"number {number}, where {self.next} is due")
        self.untold += 1
        if number >= self.next:
            self._early.setdefault(number, item)
        return self._due()

    def _due(self) -> Iterator[T]:
        while self.next in self._early:
            item = self._early.pop(self.next)
            self.next += 1
            yield item

    def told(self) -> int:
        """Return the lowest 32 bits of `next`, which is told to the sender now."""
        self.untold = 0
        return self.next % _WORD


class Unacked(Generic[T]):
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
        """Yield what is kept, oldest first."""
        return iter(self._kept)

    @property
    def open(self) -> bool:
        """Whether another may be sent now."""
        return len(self._kept) < AHEAD

    def add(self, item: T) -> int:
        """Keep an item; return the lowest 32 bits of its number."""
        self._kept.append(item)
        self.next += 1
        return (self.next - 1) % _WORD

    def hear(self, low: int) -> bool:
        """Forget all before a number, as the receiver has told it; return whether that was news.

        Raises:
            Astray: so many were never sent.
        """
        oldest = self.next - len(self._kept)
        number = whole(low, oldest)
        if number > self.next:
            raise Astray(f"{number} are said to have come, and {self.next} were sent")
        for _ in range(oldest, number):
            self._kept.popleft()
        return number > oldest
