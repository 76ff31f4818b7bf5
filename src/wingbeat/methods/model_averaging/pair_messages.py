"""What two workers that average their models say to each other. Pure.

A message is a kind, the number of the average and, of a part of a model, the number of the part;
the part itself is the payload.
"""

from __future__ import annotations

import enum

WRAPS = 1 << 32
"""Numbers in messages are below this."""


class Kind(enum.IntEnum):
    """Kinds of messages, and whose they are."""

    ASK = 1
    """Active: let us average, when it is my turn."""
    GRANT = 2
    """Passive: it is your turn; until you are done, it is nobody else's."""
    PIECE = 3
    """Active: a part of its model."""
    MEAN = 4
    """Passive: what becomes of that part."""
    DONE = 5
    """Active: all parts have come."""
    LEVEL = 6
    """Active: it asks no more until all workers have been averaged, for the ``number``-th time."""
    ALIVE = 7
    """Anybody: nothing. It has to arrive, so whoever is dead is found out."""
    FAILED = 8
    """Anybody: training has failed here."""


class Unexpected(Exception):
    """A message that the other worker does not send now; says what is wrong with it."""
