"""Frames: the wire header of a message, its checks, and how a message is composed.

Header and flow control are C++ (``native/src/header.h``, ``native/src/flow.h``), because every
message passes through them at each end. A flow carries messages to and from one peer, over one
interface, in one class.

The header is little-endian, without gaps, of `HEADER_BYTES` bytes, followed by ``spans`` times two
numbers of 8 bytes::

     0   4  magic         b"wgbt"
     4   1  version       of this layout
     5   1  type          a `Type`
     6   1  dtype         an index in `DTYPES`
     7   1  spans         number of ranges that follow, 0 to 255
     8   8  session       a random number drawn by the sender when it started
    16   4  sender        its number in the job
    20   4  receiver      number of the receiver
    24   8  sequence      number of a message in its flow, from 1
    32   8  arrived       all messages of the reverse flow up to this number have arrived
    40   8  taken         bytes of the reverse flow that the sender has consumed
    48   4  kind          kind of the message, defined by the application
    52  16  ids           four numbers of 4 bytes whose meaning depends on the kind
    68   4  length        bytes of the payload
    72   4  checksum      CRC-32 of the rest of the header, ranges included
    76      ranges        start and length of each, in elements of the dtype
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

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


Buffer: TypeAlias = "bytes | memoryview"

MAX_CLASSES = 4
"""Maximum number of traffic classes."""


class ConnectionId(NamedTuple):
    """A connection of a carrier.

    ``interface`` is the number of this process's interface; ``urgency`` is the class, 0 the most
    urgent; ``name`` is the carrier's hashable name of the remote end.
    """

    interface: int
    urgency: int
    name: Any


class Arrival(NamedTuple):
    """A received frame.

    ``head`` is the header, followed by the payload if that is small; otherwise ``payload`` is in
    the carrier's memory. ``peer`` is authenticated by its key; None without keys. ``whole`` is
    False if the frame had too many parts.
    """

    place: ConnectionId
    head: Buffer
    payload: Buffer | None
    peer: int | None
    whole: bool = True


class Carrier(Protocol):
    """Carries frames over connections. It may lose, repeat and reorder them. Not thread-safe.

    Frames arrive whole or not at all, unless a carrier cannot detect truncation.
    """

    @property
    def refused_connections(self) -> Counter[str]:
        """Number of connections refused before a frame was read, by reason."""

    @property
    def ended(self) -> int:
        """Number of connections that have ended, including those that were renewed."""

    def is_disconnected(self, place: ConnectionId) -> bool:
        """Whether a connection that this process made has ended and is not renewed.

        `send` does not detect this: frames wait for the new connection.
        """

    def connect(
        self, peer: int, interface: int, urgency: int, *, theirs: int
    ) -> ConnectionId | None:
        """Connect to a peer's interface ``theirs``; None if the peer connects to this process."""

    def send(self, place: ConnectionId, parts: Sequence[Buffer]) -> bool:
        """Send one frame without waiting; False if no connection exists now."""

    def receive(self, seconds: float) -> Arrival | None:
        """Return the next frame, the most urgent first; None after ``seconds`` without any."""

    def interrupter(self) -> Callable[[], None]:
        """Return a function for other threads that ends the current or next wait in `receive`."""

    def close(self, linger: float = 0.0) -> None:
        """Close every connection after up to ``linger`` seconds for unsent frames. Idempotent."""


NEVER = math.inf

Flow = _native.Flow
Posted = _native.Posted

MAX_IN_FLIGHT = _native.MOST_UNDER_WAY
"""Maximum messages of one flow that the connection has accepted and that have not arrived."""


DTYPES = ("", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
"""Dtypes of a payload; empty if unspecified."""

MAX_SPANS = 255
HEADER_BYTES = 76
"""Bytes of a header without ranges."""
MAX_HEADER_BYTES = HEADER_BYTES + 16 * MAX_SPANS
"""Bytes of a header with the most ranges."""


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


Malformed = _native.Malformed
"""A frame that no process of this job sent; ``str`` is one of `REASONS` or of a flow's reasons."""

REASONS = ("size", "magic", "version", "checksum", "type", "dtype", "length")
"""Why a header is rejected, in the order of the checks."""

Header = _native.Header
"""The fields of the layout above; ``spans`` are (start, length) pairs. `pack` returns the bytes."""

unpack = _native.unpack
"""Parse and check the header at the beginning of a buffer; raises `Malformed`."""


# Stored as integers: access to an enum member is slow.
_DATA, _LEAVE = int(Type.DATA), int(Type.LEAVE)
_DTYPES = {name: number for number, name in enumerate(DTYPES)}

NO_IDS = (0, 0, 0, 0)


def compose(
    kind: int,
    payload: Any,
    ids: Sequence[int],
    dtype: str,
    spans: Iterable[tuple[int, int]],
    *,
    most: int,
) -> Posted:
    """Check the arguments of `Mailbox.post` and return the message; a `UsageError` if invalid."""
    view = _byte_view(payload, most)
    number = _DTYPES.get(dtype)
    if number is None:
        raise UsageError(f"dtype={dtype!r}; allowed: {', '.join(DTYPES[1:])} or ''")
    ranges = tuple(spans)
    if len(ranges) > MAX_SPANS:
        raise UsageError(f"{len(ranges)} spans; allowed are up to {MAX_SPANS}")
    try:
        return Posted(_DATA, kind, ids, number, ranges, view)
    except (TypeError, OverflowError):
        raise UsageError(
            f"kind={kind!r}, ids={ids!r}, spans={ranges!r:.80}: allowed are a kind and four ids "
            "from 0 to 2**32 - 1, and (start, length) pairs of numbers from 0 to 2**64 - 1"
        ) from None


def leave_frame() -> Posted:
    """Return the last message of a flow."""
    return Posted(_LEAVE, 0, NO_IDS, 0, (), b"")


def _byte_view(payload: Any, most: int) -> Buffer:
    if type(payload) is bytes and len(payload) <= most:
        return payload
    try:
        view = memoryview(payload)
        # An empty view cannot be cast, and an array without elements has no bytes.
        view = view.cast("B") if view.nbytes else memoryview(b"")
    except (TypeError, BufferError) as err:
        raise UsageError(
            f"payload of type {type(payload).__name__}: {err}; allowed are objects with a "
            "contiguous buffer: bytes, a NumPy array, tensor.numpy()"
        ) from None
    if len(view) > most:
        raise UsageError(f"a payload of {len(view)} bytes; allowed are {most}: post it in pieces")
    return view


class Reassembly:
    """A buffer of ``nbytes`` bytes, filled in order; ``data`` is valid once `complete`."""

    def __init__(self, nbytes: int) -> None:
        self.data = bytearray(nbytes)
        self._filled = 0

    def append(self, fragment: Any) -> None:
        """Append a fragment; a `ValueError` if it is empty or exceeds the rest of the payload."""
        end = self._filled + len(fragment)
        if end > len(self.data) or not len(fragment):
            raise ValueError(
                f"received {len(fragment)} bytes where {len(self.data) - self._filled} remain"
            )
        self.data[self._filled : end] = fragment
        self._filled = end

    @property
    def complete(self) -> bool:
        """Whether all fragments have been received."""
        return self._filled == len(self.data)
