"""Actors: a mailbox, a clock, and state that belongs to the one thread that serves them."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from wingbeat.errors import PeerError, UsageError, WingbeatError
from wingbeat.schema import MalformedMessage, Messages
from wingbeat.transport.detector import Failed, FailureDetector
from wingbeat.transport.messages.mailbox import CLOSE_TIMEOUT_S, Mailbox
from wingbeat.transport.text import first_line

if TYPE_CHECKING:
    from wingbeat.transport.messages.frames import Message

_T = TypeVar("_T")
_F = TypeVar("_F", bound="Future[Any]")

QUICK_S = 1.0
"""Timeout to close the mailbox after a failure, in seconds."""


class Actor:
    """Serves a mailbox in one thread.

    The thread handles messages in the order of their arrival, then calls of other threads, then
    what is due by the clock. All methods that a subclass defines run in it, so its state needs no
    lock. `run` serves in the calling thread, `start` in a thread of its own. A test calls `step`
    instead, with a clock of its own. An exception of any of these methods ends the actor, and the
    futures of all callers.

    Args:
        mailbox: only the actor uses it, and closes it.
        messages: the messages that it receives; ``sizes`` are those of `Messages.parse`.
        me: name of this process in messages.
        thread: name of the thread.
        clock: returns seconds.
        close_s: timeout of `busy` after `close`, and then of closing the mailbox, in seconds.

    Attributes:
        gone: the failed peers whose messages have all been handled; see `detector`.
        error: what new and pending calls raise; None while it serves.
        failed: whether an exception has ended it.
        closing: whether `close` was called, or the subclass has finished.
        quick: whether it does not wait for peers when it closes.
    """

    check_s: ClassVar[float] = 0.25
    """Maximum seconds between two calls of `check`."""
    batch: ClassVar[int] = 256
    """Maximum messages that are handled before calls and `work`."""
    keep: ClassVar[bool] = False
    """Whether messages count against their window until `Mailbox.free`."""
    closed: ClassVar[str] = "this actor is closed"
    """The error of calls after `close`."""

    def __init__(
        self,
        mailbox: Mailbox,
        messages: Messages,
        me: str,
        thread: str = "wingbeat-actor",
        *,
        clock: Callable[[], float] = time.monotonic,
        close_s: float = CLOSE_TIMEOUT_S,
        **sizes: int,
    ) -> None:
        self.mailbox, self.me, self.clock = mailbox, me, clock
        self._messages, self._sizes, self._close_s = messages, sizes, close_s
        self.gone: dict[int, Failed] = {}
        self.error: WingbeatError | None = None
        self.failed = self.closing = self.quick = False
        self._detector = FailureDetector(mailbox, clock)
        self._calls: deque[Callable[[], object]] = deque()
        self._futures: set[Future[Any]] = set()
        self._checked_at, self._close_by, self._departed = clock(), math.inf, 0
        self._interrupt = mailbox.interrupter()
        self._thread = threading.Thread(target=self._serve, name=thread, daemon=True)

    # -- defined by subclasses ------------------------------------------------------------

    def handle(self, message: Message, record: Any) -> None:
        """Handle a message and its record; a `MalformedMessage` if it is not allowed now."""
        raise NotImplementedError

    def refuse(self, message: Message, error: MalformedMessage) -> None:
        """Handle a message that cannot be decoded or is not allowed; it is counted."""
        raise NotImplementedError

    def work(self) -> None:
        """Perform what messages and calls have made possible."""

    def check(self, now: float) -> None:
        """Perform what is due by time; also called when a peer has left or is silent."""

    def idle_s(self) -> float:
        """Return the maximum seconds to wait for a message."""
        return self.check_s

    def busy(self) -> bool:
        """Whether an actor that closes has to send more; for `close_s` seconds at most."""
        return False

    def describe(self, error: PeerError) -> PeerError:
        """Return the error of callers for the one that has ended this actor."""
        return error

    def leave(self) -> None:
        """Send last messages, without waiting."""

    # -- any thread -----------------------------------------------------------------------

    def start(self) -> None:
        """Serve in a thread of its own."""
        self._thread.start()

    def ask(self, call: Callable[[], _T]) -> Future[_T]:
        """Let the actor's thread make a call, and return the future of its result; see `submit`."""
        future = Future[_T]()
        return self.submit(lambda: future.set_result(call()), future)

    def submit(self, call: Callable[[], object], future: _F) -> _F:
        """Let the actor's thread make a call, after which it completes ``future`` at any time.

        Does not block. Calls are made in order. The future fails if the actor ends before. Raises
        PeerError if the actor has failed, and UsageError after `close`.
        """
        if (before := self.error) is not None:
            raise type(before)(str(before)) from before
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        self._calls.append(call)
        self._interrupt()
        if (error := self.error) is not None:  # it may have ended without this call
            fail(future, error)
        return future

    def close(self, *, quick: bool = False) -> None:
        """End after everything is sent, at once with ``quick``; wait for it. Idempotent."""
        self.quick = self.quick or quick
        self.closing = True
        self._interrupt()
        if self._thread.ident is None:
            self._end()
        elif threading.current_thread() is not self._thread:
            self._thread.join()

    def abandon(self) -> None:
        """Let the thread close soon. Takes no lock, because a garbage collector may call it."""
        self.closing = True

    # -- the thread -----------------------------------------------------------------------

    def run(self, parent: Callable[[], bool] = lambda: True) -> None:
        """Serve until `closing`, or ``parent()`` is false. Raises the exception that has ended it.

        ``parent`` is whether the process that has started this one is running.
        """
        try:
            while parent() and not self._has_finished():
                self.step(self.mailbox.next(self.idle_s(), keep=self.keep))
            self.quick = self.quick or not parent()
        except Exception as error:
            self.failed = True
            text = f"{self.me}: {type(error).__name__}: {first_line(error)}"
            self.error = self.describe(error if isinstance(error, PeerError) else PeerError(text))
            self.error.__cause__ = None if error is self.error else error
            raise
        finally:
            self._end()

    def step(self, message: Message | None) -> None:
        """Handle the given message, further ones that have arrived, calls, and what is due."""
        mailbox, now = self.mailbox, self.clock()
        departed = len(mailbox.left) + len(mailbox.lost)
        due = now - self._checked_at >= self.check_s or departed != self._departed
        # Read before the messages, which a peer may have sent before it left.
        gone = self._detector.failed() if due else self.gone
        if self._handle_batch(message):
            self.gone, self._departed = gone, departed if due else self._departed
        while self._calls:
            self._calls.popleft()()
        self.work()
        if due:
            self._checked_at = now
            self.check(now)

    def replaced(self, peer: int) -> None:
        """Drop the failure of a peer that another process replaces."""
        self.gone.pop(peer, None)
        self._detector = FailureDetector(self.mailbox, self.clock)

    def _handle_batch(self, message: Message | None) -> bool:
        """Handle received messages; return whether none is left."""
        for _ in range(self.batch):
            if message is None and (message := self.mailbox.poll(keep=self.keep)) is None:
                return True
            try:
                self.handle(message, self._messages.parse(message, **self._sizes))
            except MalformedMessage as error:
                self.mailbox.refused["content"] += 1
                self.refuse(message, error)
            message = None
        return False

    def _has_finished(self) -> bool:
        if not self.closing:
            return False
        now = self.clock()
        self._close_by = min(self._close_by, now + self._close_s)
        return self.quick or not (self._calls or self.busy()) or now >= self._close_by

    def _serve(self) -> None:
        with contextlib.suppress(Exception):  # callers raise it
            self.run()

    def _end(self) -> None:
        """Fail all calls, and close the mailbox."""
        try:
            with contextlib.suppress(WingbeatError):
                self.leave()
        finally:
            self.error = self.error or UsageError(f"{self.me}: {self.closed}")
            for future in tuple(self._futures):  # other threads may still submit
                fail(future, self.error)
            with contextlib.suppress(PeerError):  # already reported
                self.mailbox.close(QUICK_S if self.quick or self.failed else self._close_s)


def fail(future: Future[Any], error: WingbeatError) -> None:
    """Fail a future, unless it is done."""
    with contextlib.suppress(InvalidStateError):
        future.set_exception(error)
