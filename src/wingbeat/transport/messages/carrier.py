"""The interface of carriers, which move frames between processes, and their traffic classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

TOS = (0xB8, 0x88, 0x48)
"""TOS bytes (DSCP) of EF, AF41 and AF21; 0 is best effort."""


def tos_of(urgency: int, classes: int) -> int:
    """Return the TOS byte of a class: the last of several is best effort, as is the only one.

    >>> [hex(tos_of(u, 2)) for u in range(2)]
    ['0xb8', '0x0']
    """
    return 0x00 if urgency == classes - 1 else TOS[urgency]


Buffer: TypeAlias = "bytes | memoryview"

MAX_CLASSES = 4
"""The largest number of traffic classes."""


class ConnectionId(NamedTuple):
    """One connection, as its carrier knows it.

    ``interface`` is the number of this process's interface; ``urgency`` is the class, 0 the most
    urgent; ``name`` is the carrier's hashable name of the other end.
    """

    interface: int
    urgency: int
    name: Any


class Arrival(NamedTuple):
    """A received frame.

    Attributes:
        place: the connection.
        head: header, and the payload too if that is small.
        payload: the payload if it was sent separately, in the carrier's memory.
        peer: number of the peer whose key was proved for this connection; None without keys.
        whole: False if the frame had too many parts.
    """

    place: ConnectionId
    head: Buffer
    payload: Buffer | None
    peer: int | None
    whole: bool = True


class Carrier(Protocol):
    """Carries frames over connections. It may lose, repeat and reorder them.

    Used by one thread at a time. Frames are whole or absent, as far as the carrier can tell.
    """

    @property
    def refused_connections(self) -> Counter[str]:
        """Number of connections refused before a frame was read, by reason."""

    @property
    def ended(self) -> int:
        """Number of connections that have ended; peers may have reconnected since."""

    def is_disconnected(self, place: ConnectionId) -> bool:
        """Whether a connection that this process made has ended and is not renewed.

        Sending does not show this: frames wait for the new connection.
        """

    def connect(
        self, peer: int, interface: int, urgency: int, *, theirs: int
    ) -> ConnectionId | None:
        """Connect to a peer's interface number ``theirs``; None if the peer connects to this
        process.
        """

    def send(self, place: ConnectionId, parts: Sequence[Buffer]) -> bool:
        """Send one frame without waiting; False if no connection exists now."""

    def receive(self, seconds: float) -> Arrival | None:
        """Return the next frame, the most urgent first; None after ``seconds`` without any."""

    def interrupter(self) -> Callable[[], None]:
        """Return a function for other threads that ends the current or next wait in `receive`."""

    def close(self, linger: float = 0.0) -> None:
        """Close every connection; unsent frames may leave for ``linger`` seconds.

        May be called again.
        """
