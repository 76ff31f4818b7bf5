"""The interface of carriers, which move frames between processes, and their traffic classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

TOS = (0xB8, 0x88, 0x48)
"""For EF, AF41 and AF21; 0 is best effort."""


def tos_of(urgency: int, classes: int) -> int:
    """Return the TOS byte of a class: the last of several is best effort, as is the only one.

    >>> [hex(tos_of(u, 2)) for u in range(2)]
    ['0xb8', '0x0']
    """
    return 0x00 if urgency == classes - 1 else TOS[urgency]


Buffer: TypeAlias = "bytes | memoryview"

CLASSES = 4
"""The most classes that there are."""


class Place(NamedTuple):
    """One end of a connection as its carrier knows it.

    ``interface`` counts this process's interfaces; ``urgency`` is the class, 0 the most urgent;
    ``name`` is the carrier's own word for who is at the other end, and can be a key.
    """

    interface: int
    urgency: int
    name: Any


class Arrival(NamedTuple):
    """A frame that has come in.

    Attributes:
        place: where from.
        head: header, and the payload too if that is small.
        payload: the payload if it travelled by itself; its memory is the carrier's own.
        peer: the number of the peer whose key was proved for this connection; None where keys
            are off.
        whole: False if more parts came than a frame has.
    """

    place: Place
    head: Buffer
    payload: Buffer | None
    peer: int | None
    whole: bool = True


class Carrier(Protocol):
    """Carries frames to and from places; may lose, repeat and reorder them.

    One thread at a time. Frames are whole or absent, as far as the carrier can tell.
    """

    @property
    def turned_away(self) -> Counter[str]:
        """How many connections were refused before a frame was read, by the reason."""

    @property
    def ended(self) -> int:
        """How many connections have ended by now; peers may have made new ones since."""

    def cut(self, place: Place) -> bool:
        """Whether a connection that this process has made there has ended, and is not made anew.

        Sending does not show that: what is sent waits for the new one.
        """

    def place(self, peer: int, interface: int, urgency: int, *, theirs: int) -> Place | None:
        """Connect to a peer's interface number ``theirs``; None if the peer connects to us."""

    def send(self, place: Place, parts: Sequence[Buffer]) -> bool:
        """Hand over one frame without waiting; False if nobody is connected there now."""

    def receive(self, seconds: float) -> Arrival | None:
        """Return the next frame, the most urgent first; None after ``seconds`` without any."""

    def interrupter(self) -> Callable[[], None]:
        """Return a function for other threads: a `receive` that waits, or waits next, ends."""

    def close(self, linger: float = 0.0) -> None:
        """Close every connection, ``linger`` seconds later if frames still leave.

        May be called again.
        """
