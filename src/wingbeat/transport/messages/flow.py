"""One flow: messages to and from one peer, over one interface, in one class. Pure; time is given.

What is posted is kept until the peer says that it has arrived, so what a broken connection has lost
is sent again, and what comes twice is dropped by its number. A flow counts bytes too: what was
posted and not yet taken by the peer's user never exceeds the window.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from wingbeat.transport.messages.carrier import Buffer
from wingbeat.transport.messages.header import Header, Malformed, Type

NEVER = math.inf

TELL_AFTER = 0.005
"""Seconds that what has arrived may wait for a message that takes the news along."""

TELL_BYTES = 2 << 20
"""Bytes from which the news travels by itself, at once."""

UNDER_WAY = 8 << 20
"""Bytes that are handed to the network at a time: more would lie in its queues, and no longer in
the processors' caches when they are sent and taken in. Enough for 10 Gbit/s and 6 ms."""

ASK_AFTER, ASK_LATEST = 0.2, 2.0
"""Seconds without an answer before a sender asks what has arrived: at first, and at most."""

RESEND_AFTER = 0.05
"""Seconds in which what was sent again is not sent yet again: an answer needs time."""


_NUMBERED = (Type.DATA, Type.LEAVE)


class Posted:
    """A message that was posted; its payload must not change until `done`."""

    __slots__ = ("arrived", "dtype", "ids", "kind", "payload", "sequence", "size", "spans", "type")

    def __init__(
        self,
        type_: int,
        sequence: int,
        kind: int,
        ids: tuple[int, ...],
        dtype: int,
        spans: tuple[tuple[int, int], ...],
        payload: Buffer,
        size: int,
    ) -> None:
        self.type, self.sequence, self.kind, self.ids = type_, sequence, kind, ids
        self.dtype, self.spans, self.payload, self.size = dtype, spans, payload, size
        self.arrived = False

    def done(self) -> bool:
        """Whether it has arrived, so that its payload may be changed. Does not wait."""
        return self.arrived


@dataclass(slots=True)
class Sending:
    """The way out: what waits to be sent, and what was sent and has not arrived yet."""

    unsent: deque[Posted]
    under_way: deque[Posted]
    last: int = 0
    sent: int = 0
    posted_bytes: int = 0
    taken_bytes: int = 0
    under_way_bytes: int = 0
    waiting_since: float = NEVER
    ask_at: float = NEVER
    ask_after: float = ASK_AFTER
    hellos: int = 0
    resent_at: float = -NEVER
    resent_from: int = -1

    @property
    def empty(self) -> bool:
        """Whether all has arrived."""
        return not self.unsent and not self.under_way

    @property
    def only_leave(self) -> bool:
        """Whether all of the users' messages have arrived."""
        return all(m.type == Type.LEAVE for queue in (self.unsent, self.under_way) for m in queue)


@dataclass(slots=True)
class Receiving:
    """The way in: what has arrived, what was taken, and how much of that the peer knows."""

    arrived: int = 0
    arrived_bytes: int = 0
    taken_bytes: int = 0
    told_arrived: int = 0
    told_taken: int = 0
    tell_at: float = NEVER
    missed_at: int = -1
    hellos: int = 0
    ended: bool = False


class Flow:
    """Both ways of one flow.

    Args:
        window: bytes that may be posted and not yet taken by the peer, headers included.
        silence: seconds without a sign of the peer, while something waits for it, after which it
            is lost.
    """

    def __init__(self, window: int, silence: float) -> None:
        self.window = window
        self.silence = silence
        self._much = min(TELL_BYTES, window // 8)
        self.met = False
        self.up = False
        self.repeated = 0
        self.out = Sending(deque(), deque())
        self.into = Receiving()
        self._heard = -NEVER
        self._answers: deque[tuple[int, int]] = deque()

    @property
    def room(self) -> int:
        """Bytes that can still be posted; negative once the peer's word has been exceeded."""
        return self.window - self.waiting_bytes

    @property
    def waiting_bytes(self) -> int:
        """Bytes posted that the peer has not taken."""
        return self.out.posted_bytes - self.out.taken_bytes

    def post(self, message: Posted, now: float) -> None:
        """Queue a message; the caller has looked whether there is room."""
        out = self.out
        if not out.unsent and not out.under_way:
            out.waiting_since = now
        out.last += 1
        message.sequence = out.last
        out.posted_bytes += message.size
        out.unsent.append(message)

    def hello(self, now: float) -> None:
        """Introduce this end to the peer, at first and after the connection was made anew."""
        out = self.out
        self.up = True
        out.hellos += 1
        out.ask_at = now + out.ask_after
        self._answers.append((Type.HELLO, out.hellos))

    def accept(self, header: Header, size: int, now: float) -> bool:
        """Take in a frame that is known to be of this flow; True if it is the next message.

        Raises:
            Malformed: it speaks of what was never sent, exceeds the window, or is an old hello.
        """
        kind = header.type
        if kind in _NUMBERED:
            self._heard = now
            self._news(header, now)
            return self._message(header, size, now)
        if kind == Type.HELLO:
            if header.sequence <= self.into.hellos:
                raise Malformed("replayed")
            self.into.hellos = header.sequence
        self._heard = now
        self._news(header, now)
        if kind == Type.ASK:
            complete = self.into.arrived >= header.sequence
            self._answers.append((Type.ACKNOWLEDGE if complete else Type.MISSING, 0))
        elif kind == Type.MISSING:
            if not self._has_just_resent(header.arrived, now):
                self._resend(header.arrived, now)
        elif kind in (Type.HELLO, Type.WELCOME):
            self.met = self.up = True
            self.out.ask_after = ASK_AFTER
            self._resend(header.arrived, now)
            if kind == Type.HELLO:
                self._answers.append((Type.WELCOME, 0))
        return False

    def take(self, size: int, now: float) -> None:
        """Note that the user has taken a message of ``size`` bytes."""
        self.into.taken_bytes += size
        self._owe(now)

    def next(self, now: float) -> tuple[int, int, Posted | None] | None:
        """Return the type, sequence and message that are to be sent first; None if nothing is."""
        if self._answers:
            kind, sequence = self._answers[0]
            return kind, sequence, None
        out = self.out
        if out.unsent and out.under_way_bytes < UNDER_WAY:
            message = out.unsent[0]
            return message.type, message.sequence, message
        return (Type.ACKNOWLEDGE, 0, None) if self.into.tell_at <= now else None

    def sent(self, message: Posted | None, now: float) -> None:
        """Note that what `next` has returned was handed over, and with it what has arrived."""
        into, out = self.into, self.out
        into.told_arrived, into.told_taken = into.arrived_bytes, into.taken_bytes
        into.tell_at = NEVER
        if message is None:
            if self._answers:
                self._answers.popleft()
            return
        out.unsent.popleft()
        out.under_way.append(message)
        out.under_way_bytes += message.size
        if message.sequence > out.sent:
            out.sent = message.sequence
        if out.ask_at == NEVER:
            out.ask_at = now + out.ask_after

    def down(self) -> None:
        """Note that nothing can be handed over now; it stays where it is."""
        self.up = False

    def due(self) -> float:
        """When `tick` or `next` has something to do, if nothing arrives before."""
        out = self.out
        lost = NEVER if out.empty else max(out.waiting_since, self._heard) + self.silence
        return min(self.into.tell_at, out.ask_at, lost) if self.up else lost

    def tick(self, now: float) -> bool:
        """Let time pass; True if the peer has been silent for too long."""
        out = self.out
        if not out.empty and now >= max(out.waiting_since, self._heard) + self.silence:
            return True
        if self.up and now >= out.ask_at:
            self._ask(now)
        return False

    def _ask(self, now: float) -> None:
        """Ask what has arrived; who does not answer that may not know who is asking."""
        out = self.out
        again = out.ask_after > ASK_AFTER
        out.ask_after = min(2 * out.ask_after, ASK_LATEST)
        if not self.met or (again and out.under_way):
            self.hello(now)
        elif out.under_way:
            out.ask_at = now + out.ask_after
            self._answers.append((Type.ASK, out.under_way[-1].sequence))
        else:
            out.ask_at = NEVER

    def pending(self) -> bool:
        """Whether `next` returns something whatever the time is."""
        out = self.out
        return bool(self._answers or (out.unsent and out.under_way_bytes < UNDER_WAY))

    def _message(self, header: Header, size: int, now: float) -> bool:
        into = self.into
        if header.sequence != into.arrived + 1:
            if header.sequence <= into.arrived:
                self.repeated += 1
                into.tell_at = now  # the peer may not know
            elif into.missed_at != into.arrived:
                into.missed_at = into.arrived
                self._answers.append((Type.MISSING, 0))
            return False
        if into.arrived_bytes - into.taken_bytes + size > self.window:
            raise Malformed("window")
        into.arrived += 1
        into.arrived_bytes += size
        if header.type == Type.LEAVE:
            into.ended = True
        self._owe(now)
        return True

    def _owe(self, now: float) -> None:
        into = self.into
        untold = max(into.arrived_bytes - into.told_arrived, into.taken_bytes - into.told_taken)
        if untold >= self._much:
            into.tell_at = now
        elif into.tell_at == NEVER:
            into.tell_at = now + TELL_AFTER

    def _news(self, header: Header, now: float) -> None:
        """Let go of what has arrived at the peer."""
        out = self.out
        if header.arrived > out.sent or header.taken > out.posted_bytes:
            raise Malformed("sequence")
        out.taken_bytes = max(out.taken_bytes, header.taken)
        before = len(out.under_way) + len(out.unsent)
        while out.under_way and out.under_way[0].sequence <= header.arrived:
            out.under_way_bytes -= _arrived(out.under_way.popleft())
        while out.unsent and out.unsent[0].sequence <= header.arrived:
            _arrived(out.unsent.popleft())  # it was to be sent once more
        if len(out.under_way) + len(out.unsent) < before:
            out.waiting_since = now
            out.ask_after = ASK_AFTER
            out.ask_at = now + ASK_AFTER if out.under_way else NEVER

    def _resend(self, arrived: int, now: float) -> None:
        """Send once more what comes after ``arrived``."""
        out = self.out
        out.resent_from, out.resent_at = arrived, now
        out.unsent.extendleft(reversed(out.under_way))
        out.under_way.clear()
        out.under_way_bytes = 0

    def _has_just_resent(self, arrived: int, now: float) -> bool:
        """Whether what comes after ``arrived`` may still be on its way a second time."""
        return self.out.resent_from == arrived and now < self.out.resent_at + RESEND_AFTER


def _arrived(message: Posted) -> int:
    """Let go of a message's payload; return the bytes that the message had."""
    message.arrived, message.payload = True, b""
    return message.size
