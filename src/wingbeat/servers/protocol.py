"""What workers and servers say to each other: kinds of messages, and what their ids mean."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Kind(enum.IntEnum):
    """Kinds of messages, in the message layer's sense."""

    PUSH = 1
    """Worker to server: gradients of a slice; the sum is sent back when it is complete."""
    STORE = 2
    """Worker to server: gradients of a slice; the sum stays there until it is pulled."""
    PULL = 3
    """Worker to server: send the sum of a slice when it is complete."""
    SUM = 4
    """Server to worker: the sum of a slice over all workers."""
    FAILED = 5
    """Server to worker: why there will be no more sums, in UTF-8."""
    TAKE = 32
    """Worker to server: send what the sums of a slice, up to this round, still lack; forget it."""
    REST = 33
    """Server to worker: that, in float32; empty if it is nothing."""


class Ids(NamedTuple):
    """The four numbers that each message about a slice has.

    Attributes:
        plan: how often buckets had been made anew.
        slice: its number in that plan.
        round: how often the slice had been summed before.
        wish: how the sum is to be sent, see `wish_of`.
    """

    plan: int
    slice: int
    round: int
    wish: int


_POSITIONS = 1 << 24


def wish_of(urgency: int, position: int) -> int:
    """Pack the class in which a sum is to travel, and its place in the order of forward."""
    return urgency << 24 | min(position, _POSITIONS - 1)


def urgency_of(wish: int) -> int:
    """Return the class in which a sum is to travel, 0 the most urgent."""
    return wish >> 24


def position_of(wish: int) -> int:
    """Return a sum's place in the order in which forward needs it."""
    return wish & _POSITIONS - 1


TEXT = 500
"""Bytes that a reason may take."""
