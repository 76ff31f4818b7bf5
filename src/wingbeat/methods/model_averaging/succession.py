"""What workers do when the group generator has ended: one of them starts another one.

The membership log decides. The end of a generator is an entry, and its successor is the next
incarnation. The worker that claims an incarnation in the store starts it, and no other one does. If
it has not appeared after a while, any worker logs the end of that incarnation too, and the one
after it is claimed. `Succession` has these rules, without a clock or I/O.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from wingbeat.errors import WingbeatError
from wingbeat.transport.services import BackgroundThread
from wingbeat.transport.text import first_line

if TYPE_CHECKING:
    from wingbeat.methods.model_averaging.static_client import StatusTable
    from wingbeat.transport.messages.mailbox import Mailbox

_log = logging.getLogger(__name__)

START_S = 20.0
"""Seconds for a generator to appear after it was claimed, and then to accept a worker."""

MAX_GENERATORS = 256
"""Maximum incarnations of a generator: each has a range of connection ids of its own."""

_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.5, 60.0
"""Seconds between the end of a generator and the next claim; doubled for each one that ends early.
"""

_STABLE_S = 60.0
"""Seconds after which a generator has not ended early."""

_POLL_S = 0.25


class Act(enum.Enum):
    """What to do about an incarnation of the generator."""

    WAIT = enum.auto()
    CLAIM = enum.auto()
    """Claim it, report the result to `Succession.claimed`, and start it if the claim is own."""
    END = enum.auto()
    """Log its end: it did not appear."""
    CONNECT = enum.auto()
    """Connect to it."""


class Next(NamedTuple):
    """An action, and the incarnation that it is about."""

    act: Act
    incarnation: int


class Succession:
    """Decides what one worker does while it has no generator."""

    def __init__(self) -> None:
        self._lost = -1
        self._next, self._since, self._claimed_at = 0, -math.inf, math.inf
        self._pause_s, self._connected_at = _FIRST_PAUSE_S, math.inf

    def advance(self, now: float, number: int) -> Next:
        """Return what to do now; ``number`` is the generator's in the membership log."""
        if number % 2 == 0 and number // 2 <= self._lost:
            return Next(Act.END, number // 2)  # its end could not be logged
        if number % 2 == 0:
            self._connected_at = min(self._connected_at, now)
            return Next(Act.CONNECT, number // 2)
        incarnation = number // 2 + 1
        if incarnation != self._next:
            early = now < self._connected_at + _STABLE_S
            pause = min(2 * self._pause_s, _MAX_PAUSE_S) if early else _FIRST_PAUSE_S
            self._pause_s = pause if self._next else _FIRST_PAUSE_S
            self._next, self._since = incarnation, now
            self._claimed_at = self._connected_at = math.inf
        if now < self._since + self._pause_s or incarnation >= MAX_GENERATORS:
            return Next(Act.WAIT, incarnation)
        if self._claimed_at == math.inf:
            return Next(Act.CLAIM, incarnation)
        late = now > self._claimed_at + START_S
        return Next(Act.END if late else Act.WAIT, incarnation)

    def lost(self, incarnation: int) -> None:
        """Record that this worker has lost its generator."""
        self._lost = incarnation

    def claimed(self, now: float) -> None:
        """Record that the incarnation is claimed, by this worker or another one."""
        self._claimed_at = now


class GeneratorSearch:
    """Performs a `Succession` until this worker is connected to a generator.

    Args:
        table: what the store has about generators.
        connect: connects to an incarnation.
        start: starts an incarnation in the background.
        me: name of this worker in messages.

    Attributes:
        number: the generator's number in the log, as last read.
    """

    def __init__(
        self,
        table: StatusTable,
        connect: Callable[[int], Mailbox],
        start: Callable[[int], None],
        me: str,
    ) -> None:
        self._table, self._connect, self._start, self._me = table, connect, start, me
        self._rules = Succession()
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._thread: BackgroundThread | None = None
        self.number = 0
        self._found: Mailbox | None = None

    def begin(self, lost: int) -> None:
        """Search in a thread for a generator after the incarnation that this worker has lost."""
        self._rules.lost(lost)
        self._thread = BackgroundThread(self._run, "wingbeat-succession")
        self._thread.start()

    @property
    def runs(self) -> bool:
        """Whether the thread searches."""
        return self._thread is not None and self._thread.is_alive()

    def take(self) -> Mailbox | None:
        """Return the mailbox that was found, once; None if there is none."""
        with self._lock:
            found, self._found = self._found, None
            return found

    def find(self, seconds: float) -> Mailbox | None:
        """Search in this thread; None if there is no generator after ``seconds``."""
        self._run(time.monotonic() + seconds)
        return self.take()

    def stop(self) -> None:
        """End the search; does not wait for it."""
        self._stopped.set()
        if (found := self.take()) is not None:
            found.abandon()

    def _run(self, deadline: float = math.inf) -> None:
        while not self._stopped.is_set() and time.monotonic() < deadline:
            self.number = self._table.generator()
            act, incarnation = self._rules.advance(time.monotonic(), self.number)
            if act is Act.CONNECT:
                if self._try_connect(incarnation):
                    return
            elif act is Act.CLAIM:
                self._claim(incarnation)
            elif act is Act.END:
                self._table.end_generator(incarnation)
            self._stopped.wait(_POLL_S)

    def _claim(self, incarnation: int) -> None:
        mine = self._table.claim_generator(incarnation)
        if mine is None:
            return
        self._rules.claimed(time.monotonic())
        if mine:
            try:
                self._start(incarnation)
            except (WingbeatError, OSError, RuntimeError) as error:
                _log.warning(
                    "%s: cannot start the group generator again: %s", self._me, first_line(error)
                )
                self._table.end_generator(incarnation)

    def _try_connect(self, incarnation: int) -> bool:
        try:
            mailbox = self._connect(incarnation)
        except (WingbeatError, TimeoutError, OSError, RuntimeError) as error:
            _log.debug("%s: no group generator yet: %s", self._me, first_line(error))
            self._table.end_generator(incarnation)
            return False
        with self._lock:
            if not self._stopped.is_set():
                self._found = mailbox
                return True
        with contextlib.suppress(WingbeatError):
            mailbox.abandon()
        return True
