"""Failure detection: the rules by which a process that others wait for counts as failed.

- It has left: it closed its mailbox.
- It has ended: for `RECONNECT_S` it has had no connection over any interface. A live process
  connects again within moments, and the kernel of a stopped one keeps its connections.
- It is silent: it has not acknowledged a message for `Limits.silence`, or what it sends regularly
  is overdue by an adaptive timeout: `TIMEOUT_FACTOR` times the longest recent interval.
- Nothing is overdue for as long as this process itself was suspended.

A process that is alive by these rules may still be blocked: see `failures.MAX_WAIT_FACTOR`.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Set
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from wingbeat.transport.messages.mailbox import Mailbox

RECONNECT_S = 1.0
"""Seconds for a live process to renew a lost connection."""

TIMEOUT_FACTOR = 8.0
"""An adaptive timeout, in multiples of the longest recent interval."""

_DECAY = 0.9
"""Factor by which the longest interval decreases with each later one."""

_POLL_S = 0.25
"""Seconds between two checks for closed connections, which take a lock of the network thread."""


class Failure(enum.Enum):
    """How a peer has failed; the first one that applies."""

    LEFT = enum.auto()
    SILENT = enum.auto()
    ENDED = enum.auto()


class Failed(NamedTuple):
    """A failed peer: how, and the same as a predicate for messages."""

    how: Failure
    text: str


LEFT = Failed(Failure.LEFT, "has left")
ENDED = Failed(Failure.ENDED, "has ended unexpectedly: its connections are closed")


class FailureDetector:
    """Finds the failed peers of a mailbox by the rules of this module.

    If peers also reach each other over other peers, ``reached`` returns those that are reached
    directly. If the network was cut before, closed connections do not show that a peer has ended.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        clock: Callable[[], float] = time.monotonic,
        reached: Callable[[], Set[int]] | None = None,
    ) -> None:
        self._mailbox, self._clock, self._reached = mailbox, clock, reached
        self._polled = float("-inf")
        self._closed_at: dict[int, float] = {}
        self._cut: set[int] = set()

    def failed(self) -> dict[int, Failed]:
        """Return the peers that have failed and are not back.

        Call this before the latest messages are read, so that a peer's last messages count.
        """
        return {
            **dict.fromkeys(self.closed_before(self._clock() - RECONNECT_S), ENDED),
            **{peer: Failed(Failure.SILENT, how) for peer, how in self._mailbox.lost.items()},
            **dict.fromkeys(self._mailbox.left, LEFT),
        }

    def closed_before(self, when: float) -> list[int]:
        """Return the peers without connections since before ``when``."""
        now = self._clock()
        if now >= self._polled + _POLL_S:
            self._polled, closed = now, self._mailbox.unconnected()
            if self._reached is not None:
                new = closed.keys() - self._closed_at.keys() - self._cut
                self._cut = (self._cut & closed.keys()) | (new - self._reached())
            self._closed_at = {p: now - closed[p] for p in closed if p not in self._cut}
        return [peer for peer, closed_at in self._closed_at.items() if closed_at < when]


class AdaptiveTimeout:
    """A timeout that follows recorded intervals, from ``least`` to ``most`` seconds.

    It is ``first`` seconds, by default ``least``, while none is recorded. The first interval, which
    may include a warm-up, counts until there is another one.
    """

    def __init__(
        self, least: float, most: float = float("inf"), first: float | None = None
    ) -> None:
        self._least, self._most = least, max(least, most)
        self._first = least if first is None else first
        self._intervals = 0
        self.longest = 0.0

    def record(self, seconds: float) -> None:
        """Record the interval before an event."""
        self._intervals += 1
        decay = _DECAY if self._intervals > 2 else 0.0
        self.longest = max(seconds, decay * self.longest)

    @property
    def seconds(self) -> float:
        """The current timeout."""
        if not self._intervals:
            return self._first
        return min(max(self._least, TIMEOUT_FACTOR * self.longest), self._most)


class Deadlines:
    """By when the next event of each peer is due: a message, or the end of a step.

    Each peer has an `AdaptiveTimeout` with these arguments. Time is passed in.
    """

    def __init__(
        self, least: float, most: float = float("inf"), first: float | None = None
    ) -> None:
        self._limits_of = least, most, first
        self._timeouts: dict[int, AdaptiveTimeout] = {}
        self._since: dict[int, float] = {}
        self._limits: dict[int, float] = {}

    def __contains__(self, peer: int) -> bool:
        """Whether an event of ``peer`` is expected."""
        return peer in self._since

    def start(self, peer: int, now: float, limit: float | None = None) -> None:
        """Expect the next event of ``peer`` from now on.

        With ``limit``, it is due after that many seconds, and the interval before it is unusual: it
        is not recorded.
        """
        self._since[peer] = now
        if limit is not None:
            self._limits[peer] = limit

    def stop(self, peer: int) -> None:
        """Expect no event of ``peer``, which waits for others."""
        self._since.pop(peer, None)

    def arrived(self, peer: int, now: float) -> None:
        """Record an event; the next one is expected after `start`."""
        since = self._since.pop(peer, None)
        if self._limits.pop(peer, None) is None and since is not None:
            self._timeout(peer).record(now - since)

    def forget(self, peer: int) -> None:
        """Drop the intervals of ``peer``: another process replaces it, or none."""
        for each in (self._timeouts, self._since, self._limits):
            each.pop(peer, None)

    def timeout_s(self, peer: int) -> float:
        """Return the timeout of the current event."""
        limit = self._limits.get(peer)
        return self._timeout(peer).seconds if limit is None else limit

    def since(self, peer: int) -> float:
        """Return the time from which an event is expected, that of the last one if it repeats."""
        return self._since[peer]

    def waited(self, peer: int, now: float) -> float:
        """Return the seconds for which an event has been expected; 0 if none is."""
        return now - self._since.get(peer, now)

    def is_unusual(self, peer: int, now: float) -> bool:
        """Whether the wait is twice as long as usual, so that the peer may have failed."""
        return self.waited(peer, now) > 2 * self._timeout(peer).longest

    def is_overdue(self, peer: int, now: float) -> bool:
        """Whether the event has timed out."""
        return self.waited(peer, now) > self.timeout_s(peer)

    def overdue(self, now: float) -> dict[int, float]:
        """Return the peers whose event has timed out, with the seconds waited."""
        return {peer: now - at for peer, at in self._since.items() if self.is_overdue(peer, now)}

    def postpone(self, seconds: float) -> None:
        """Extend all waits: this process was suspended."""
        for peer in self._since:
            self._since[peer] += seconds

    def _timeout(self, peer: int) -> AdaptiveTimeout:
        if peer not in self._timeouts:
            self._timeouts[peer] = AdaptiveTimeout(*self._limits_of)
        return self._timeouts[peer]
