"""Names of the numbers in headers of frames, which the extension writes and checks."""

from __future__ import annotations

import enum


class Type(enum.IntEnum):
    """Type of a frame."""

    HELLO = 1
    """Introduces the sender with its acknowledgements, and requests WELCOME."""
    WELCOME = 2
    """The reply to HELLO."""
    DATA = 3
    """An application message."""
    ACKNOWLEDGE = 4
    """Acknowledgements only: ``arrived`` and ``taken``."""
    MISSING = 5
    """As ACKNOWLEDGE, and requests retransmission of everything after ``arrived``."""
    ASK = 6
    """Requests an acknowledgement up to ``sequence``."""
    LEAVE = 7
    """The last message of the flow: the sender is shutting down gracefully."""


REASONS = ("size", "magic", "version", "checksum", "type", "dtype", "length")
"""Why a header is rejected, in the order of the checks."""
