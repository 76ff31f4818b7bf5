"""The interface of carriers, which move frames between processes, and their traffic classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

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
