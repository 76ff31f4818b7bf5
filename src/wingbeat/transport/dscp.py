"""The byte of the IP header by which switches tell classes of traffic apart (DSCP)."""

from __future__ import annotations

TOS = (0xB8, 0x88, 0x48)
"""For EF, AF41 and AF21; 0 is best effort."""


def tos_of(urgency: int, classes: int) -> int:
    """Return the TOS byte of a class: the last of several is best effort, as is the only one.

    >>> [hex(tos_of(u, 2)) for u in range(2)]
    ['0xb8', '0x0']
    """
    return 0x00 if urgency == classes - 1 else TOS[urgency]
