"""Long waits in collectives: liveness checks of the peer and comparison of the calls."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

from wingbeat.transport.failures import LOGGED_S, LONGEST, Wait, is_worth_waiting, say_waiting
from wingbeat.transport.gloo import abort
from wingbeat.transport.link import Link
from wingbeat.transport.store import Store
from wingbeat.transport.text import printable

if TYPE_CHECKING:
    from wingbeat.transport.world import World

_LONGEST = 120
"""Characters of what a peer says it is in."""

_PATIENCE = 2.0
"""Seconds for the store to answer with what it has."""


class Calls:
    """The calls of a world's ranks in one lane, in the rendezvous store.

    The n-th collective of a lane must be the same on all ranks. A rank that waits for long
    publishes its calls, and reads what its peers have published. While all goes well nothing is.
    """

    def __init__(self, world: World, lane: int) -> None:
        self._store = world.store
        self._rank = world.ranks[world.rank]
        self._room = f"{world.path}/calls/{lane}"

    def compare(
        self, calls: Mapping[int, str], peers: Iterable[int]
    ) -> tuple[int, str, str] | None:
        """Publish this rank's ``calls`` by their numbers; return a peer whose call differs.

        Returns:
            The first peer that has published another call of the same number, this rank's call
            and the peer's; None if none has.
        """
        mine = "\n".join(f"{number} {call}" for number, call in sorted(calls.items()))
        with contextlib.suppress(RuntimeError, TimeoutError):  # the store may be gone
            self._store.set(f"{self._room}/{self._rank}", mine)
            for peer in peers:
                if peer == self._rank or not self._store.has(f"{self._room}/{peer}"):
                    continue
                for line in self._store.get(f"{self._room}/{peer}", _PATIENCE).splitlines():
                    number, _, theirs = printable(line, _LONGEST).partition(" ")
                    call = calls.get(int(number)) if number.isdecimal() else None
                    if call is not None and theirs != call:
                        return peer, call, theirs
        return None


_LOOK_S = 0.25
"""Seconds between two looks at the waits of this process."""

_ASK_S = 5.0
"""Seconds between two looks at whether a peer lives, at most."""


class Waiting(NamedTuple):
    """A wait that is under way.

    Attributes:
        peer: for whom, counted among all workers.
        what: in what, as `str` has it.
        link: over which.
        end: the peer's number there.
    """

    peer: int
    what: object
    link: Link
    end: int


class Watched(Protocol):
    """What has waits."""

    @property
    def waiting(self) -> Waiting | None:
        """The one under way; the same object for as long as it lasts."""


class Watch:
    """Looks after the waits of one thread.

    Args:
        store: of all workers; no wait in it locks it for this.
        rank: this worker.
        timeout: seconds without an answer of a peer's process after which a wait for it ends.
        of: has the waits; not kept alive.

    Attributes:
        why: why the last wait was cut short; empty if it was not.
    """

    def __init__(self, store: Store, rank: int, timeout: float, of: Watched) -> None:
        self._store, self._rank, self._timeout = store, rank, timeout
        self._of = weakref.ref(of)
        self._now: Waiting | None = None
        self._wait = Wait("", "")
        self._heard = self._asked = 0.0
        self._said = False
        self.why = ""

    def look(self) -> None:
        """See how long the wait of now has lasted, and whether it is to go on."""
        of = self._of()
        waiting = None if of is None else of.waiting
        if waiting is not self._now:
            self._begin(waiting)
        elif waiting is not None and not self.why:
            self._go_on(waiting)

    def _begin(self, waiting: Waiting | None) -> None:
        if self._said:
            self._said = False
            say_waiting(self._store, self._rank, None)
        self._now, self.why = waiting, ""
        if waiting is not None:
            self._wait = Wait(f"rank {self._rank}", str(waiting.what))
            self._heard = self._asked = self._wait.begun

    def _go_on(self, waiting: Waiting) -> None:
        lasted = self._wait.seconds()
        if lasted < min(self._timeout / 2, LOGGED_S):
            return
        if not self._said:
            self._said = True
            say_waiting(self._store, self._rank, waiting.peer)
        now = time.monotonic()
        if now - self._asked >= min(self._timeout / 8, _ASK_S):
            self._asked = now
            if is_worth_waiting(self._store, self._rank, waiting.peer):
                self._heard = now
                self._wait.look(f"rank {waiting.peer}")
        if now - self._heard > self._timeout:
            self.why = f"Timed out: no sign of life for {self._timeout:g} s"
        elif lasted > LONGEST * self._timeout:
            self.why = (
                f"Timed out: it lives, and stands elsewhere for {LONGEST:g} times the timeout of "
                "wingbeat.init(); see where with `py-spy dump`"
            )
        if self.why:
            abort(waiting.link, waiting.end)


_watches: weakref.WeakSet[Watch] = weakref.WeakSet()
_starting = threading.Lock()
_thread: threading.Thread | None = None


def watch(each: Watch) -> None:
    """Have a thread look after it for as long as it exists."""
    global _thread
    with _starting:
        _watches.add(each)
        if _thread is None:
            _thread = threading.Thread(target=_run, name="wingbeat-waits", daemon=True)
            _thread.start()


def unwatch(each: Watch) -> None:
    """Look after it no more; the thread ends when nothing is left to look after."""
    _watches.discard(each)


def _run() -> None:
    global _thread
    while True:
        time.sleep(_LOOK_S)
        with _starting:
            if not _watches:
                _thread = None
                return
        for each in list(_watches):
            with contextlib.suppress(RuntimeError, OSError):  # it is being closed
                each.look()


def _after_fork() -> None:
    global _thread, _starting
    _thread, _starting = None, threading.Lock()
    _watches.clear()


os.register_at_fork(after_in_child=_after_fork)
