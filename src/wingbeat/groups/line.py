"""A worker's line to the group generator: what they say, and whether that lives."""

from __future__ import annotations

import contextlib
import time
from collections import deque

from wingbeat.errors import PeerError
from wingbeat.groups.protocol import Kind
from wingbeat.transport.messages.endpoint import Message
from wingbeat.transport.messages.mailbox import RECONNECT_S, Mailbox

_LOOK_S = 0.25
"""Seconds between two looks at whether the generator lives, while a group is waited for."""

_PROBE_S = 1.0
"""Seconds between two messages that are sent only to see whether they arrive."""


class Dead(Exception):
    """The generator is; says why."""


class Line:
    """Messages to and from the generator; for one thread.

    Args:
        mailbox: joins this worker to the generator.
        worker: its rank.
        generator: the number of the generator's mailbox.
        timeout: seconds that a group may be waited for.

    Attributes:
        heard: what the generator has said that nobody has acted on, oldest first.
    """

    def __init__(self, mailbox: Mailbox, worker: int, generator: int, timeout: float) -> None:
        self._mailbox, self._worker, self._generator = mailbox, worker, generator
        self._timeout, self._probed = timeout, 0.0
        self._dead = False
        self.heard: deque[Message] = deque()

    @property
    def dead(self) -> bool:
        """Whether the generator has left, is lost or has ended without a word: then for good."""
        if not self._dead:
            mailbox, generator = self._mailbox, self._generator
            self._dead = (
                generator in mailbox.left
                or generator in mailbox.lost
                or mailbox.unconnected().get(generator, 0.0) > RECONNECT_S
            )
        return self._dead

    def post(self, kind: Kind, *ids: int) -> None:
        """Tell the generator.

        Raises:
            Dead: it is gone.
        """
        try:
            padded = (*ids, 0, 0, 0, 0)[:4]
            self._mailbox.post(self._generator, kind, ids=padded, urgency=0)
        except PeerError as error:
            raise Dead(str(error)) from None

    def next(self, deadline: float) -> Message:
        """Wait for the generator's next message.

        Raises:
            Dead: it is gone.
            PeerError: none came in time.
        """
        asked = time.monotonic()
        while True:
            if self.heard:
                return self.heard.popleft()
            try:
                return self._mailbox.receive(_LOOK_S, of=[self._generator])
            except PeerError as error:
                if self.dead:
                    raise Dead(self._why(error)) from None
            now = time.monotonic()
            if now >= deadline:
                raise PeerError(
                    f"rank {self._worker}: no group came from the group generator within "
                    f"{self._timeout:g} s; check that the others still train"
                )
            if now - asked >= _PROBE_S:
                asked = now
                self.post(Kind.ALIVE)  # which has to arrive

    def listen(self) -> None:
        """Take in what the generator has said by now."""
        while (message := self._mailbox.poll(of=[self._generator])) is not None:
            self.heard.append(message)

    def probe(self) -> None:
        """Ask for a sign of the generator, now and then: if it is dead, this does not arrive."""
        now = time.monotonic()
        if now - self._probed >= _PROBE_S:
            self._probed = now
            with contextlib.suppress(Dead):
                self.post(Kind.ALIVE)

    def _why(self, error: PeerError) -> str:
        """Return what to say of the generator, which is dead, after a wait that ended so."""
        if self._generator in self._mailbox.left or self._generator in self._mailbox.lost:
            return str(error)
        return "it has ended without a word"
