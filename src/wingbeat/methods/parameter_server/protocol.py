"""What workers and servers say to each other: kinds of messages, and what their ids mean."""

from __future__ import annotations

import enum
from collections.abc import Sequence
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
    TAKE = 6
    """Worker to server: send what the sums of a slice, up to this round, still lack; forget it."""
    REST = 7
    """Server to worker: that, in float32; empty if it is nothing."""
    # Only where servers update. What workers say travels in one class, and arrives in order.
    HOLD = 8
    """Worker to server: what a slice consists of; its values and state follow in `MORE`."""
    MORE = 9
    """Either way: more of what the message before has begun."""
    READY = 10
    """Worker to server: all slices that this worker is to hold were sent; servers wait for all."""
    FINAL = 11
    """Worker to server: gradients of a slice that are to be used in place of the sum."""
    STEP = 12
    """Worker to server: update all slices, with these settings."""
    FETCH = 13
    """Worker to server: send the parameters of a slice when they are updated."""
    PARAMETERS = 14
    """Server to worker: the parameters of a slice."""
    STATE = 15
    """Worker to server: send what the optimizer remembers of a slice; and the answer's begin."""
    EXPECT = 16
    """Never sent: parameters that come without being asked for, as a `STEP` has it."""
    ALIVE = 17
    """Either way: nothing. It has to arrive, so a card that has died is found out."""


UPDATES = frozenset(
    {Kind.HOLD, Kind.MORE, Kind.READY, Kind.FINAL, Kind.STEP, Kind.FETCH, Kind.STATE}
)
"""What workers send to servers that update."""

SENT = UPDATES - {Kind.FETCH, Kind.STATE} | {Kind.STORE}
"""What is sent without an answer."""

NO_ROUND = 2**32 - 1
"""In place of a round: no sum, but the gradients that are sent as `Kind.FINAL`."""


class Ids(NamedTuple):
    """The four numbers that each message about a slice has.

    Attributes:
        plan: how often buckets had been made anew.
        slice: its number in that plan.
        round: how often the slice had been summed before; of parameters and what is said of them,
            how many updates there were.
        wish: how the sum is to be sent, see `wish_of`. In a `Kind.STEP` the slice is the round
            whose sums are used, and this is 1 where parameters are to come unasked.
    """

    plan: int
    slice: int
    round: int
    wish: int


_POSITIONS = 1 << 24
_URGENCIES = 1 << 4

LINKS = 1 << 4
"""The most links that slices are divided among."""


def wish_of(urgency: int, position: int, link: int = 0) -> int:
    """Pack the class and the link by which a sum is to travel, and its place in forward's order."""
    return link << 28 | urgency << 24 | min(position, _POSITIONS - 1)


def link_of(wish: int) -> int:
    """Return the link by which a sum is to travel, see `interface_of`."""
    return wish >> 28


def interface_of(reach: Sequence[int], link: int) -> int:
    """Return the interface that a link is to a peer.

    Processes number their interfaces in the order of networks, so both ends mean the same network.

    Args:
        reach: the own interfaces that lead there, in order: fewer than there are links to a process
            of the same host, or where not all networks join all hosts.
        link: its number.
    """
    return reach[link % len(reach)]


def urgency_of(wish: int) -> int:
    """Return the class in which a sum is to travel, 0 the most urgent."""
    return wish >> 24 & _URGENCIES - 1


def position_of(wish: int) -> int:
    """Return a sum's place in the order in which forward needs it."""
    return wish & _POSITIONS - 1


TEXT = 500
"""Bytes that a reason may take."""
