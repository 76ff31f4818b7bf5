"""Limits, constants and native types of messages.

Headers, flows and connections are C++ (``native/src``: ``header.h``, ``flow.h``, ``endpoint.h``,
``carrier.h``). A flow carries messages to and from one peer, over one interface, in one class.
``docs/developers/messages.md`` has the layout of a header.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from wingbeat import _native
from wingbeat.errors import UsageError

TOS = (0xB8, 0x88, 0x48)
"""TOS bytes (DSCP) of EF, AF41 and AF21; 0 is best effort."""


def tos_of(urgency: int, classes: int) -> int:
    """Return the TOS byte of a class. The last class is best effort.

    >>> [hex(tos_of(u, 2)) for u in range(2)]
    ['0xb8', '0x0']
    """
    return 0x00 if urgency == classes - 1 else TOS[urgency]


MAX_CLASSES = 4
"""Maximum number of traffic classes."""

NEVER = math.inf

Message = _native.Received
Posted = _native.Posted

DTYPES = _native.DTYPES
"""Dtypes of a payload; empty if unspecified."""

MAX_SPANS = 255
HEADER_BYTES = 76
"""Bytes of a header without ranges."""
MAX_HEADER_BYTES = HEADER_BYTES + 16 * MAX_SPANS
"""Bytes of a header with the most ranges."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of messages in flight.

    Raises:
        UsageError: an invalid limit.

    Attributes:
        message: bytes of one payload.
        window: bytes of one flow that its peer has not consumed; headers count.
        silence: seconds without a sign of life from an awaited peer after which it is lost.
    """

    message: int = 4 << 20
    window: int = 32 << 20
    silence: float = 300.0

    def __post_init__(self) -> None:
        if not 0 < self.message < 2**31:
            raise UsageError(f"Limits(message={self.message!r}); allowed: 1 to 2**31 - 1 bytes")
        if self.window < self.message + MAX_HEADER_BYTES:
            raise UsageError(
                f"Limits(window={self.window!r}); allowed: {MAX_HEADER_BYTES} bytes and more above "
                f"message={self.message}, so that one message fits in"
            )
        if not 0 < self.silence < float("inf"):
            raise UsageError(f"Limits(silence={self.silence!r}); allowed are seconds above 0")


class Reassembly:
    """A payload of ``nbytes`` bytes, received in order; ``data`` is valid once `complete`.

    Its memory grows with what has arrived, so a peer takes none by a large ``nbytes`` alone.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.data = nbytes, bytearray()

    def append(self, fragment: Any) -> None:
        """Append a fragment; a `ValueError` if it is empty or exceeds the rest of the payload."""
        rest = self.nbytes - len(self.data)
        if not 0 < len(fragment) <= rest:
            raise ValueError(f"received {len(fragment)} bytes where {rest} remain")
        self.data += fragment

    @property
    def complete(self) -> bool:
        """Whether all fragments have been received."""
        return len(self.data) == self.nbytes
