"""What averages parameters, as those see it who find out with whom."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import Protocol

from wingbeat.methods.model_averaging.generator import Run

STATIC = -1
"""The initiator of groups that nobody has asked for, whose numbers grow with their step."""

GIVEN_UP = -1
"""In place of a member that was lost: not all members have come, and some will not."""

STATIC_MEETINGS = 1 << 31
"""Meetings of groups that nobody has asked for are numbered from here on: no generator gets so
far."""


class Coming(enum.Enum):
    """Whether members of a group that have not come yet will; true if they may."""

    MAYBE = enum.auto()
    PAST = enum.auto()
    """Some will not; but if they have been there, what they sent may still arrive."""
    NEVER = enum.auto()
    """Some will not, and have not been there."""

    def __bool__(self) -> bool:
        return self is Coming.MAYBE


class Averages(Protocol):
    """What averages parameters with a group's."""

    def average(self, run: Run, meeting: int, coming: Callable[[], Coming]) -> int | None:
        """Average the parameters of a group of two and more.

        Args:
            run: the group.
            meeting: its number; connections of a meeting of this number are kept from before.
            coming: whether members that have not come will: who dies before a group, or was not
                told of it because the generator has died, is waited for in vain, and `GIVEN_UP` is
                to be returned.

        Returns:
            A member that was lost, `GIVEN_UP`, or None.
        """
        ...

    def close(self, meetings: Iterable[int] | None = None) -> None:
        """Keep the connections of these meetings no longer; of any if None."""
