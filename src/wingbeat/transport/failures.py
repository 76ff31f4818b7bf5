"""Failure attribution and liveness: which worker failed first, and how long to wait for a peer."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from wingbeat.observe.log import log
from wingbeat.transport.incarnation import lives
from wingbeat.transport.text import LONGEST_ERROR, described, number, printable

if TYPE_CHECKING:
    from wingbeat.transport.store import Store

PATIENCE = 2.0
"""Seconds to give another worker to say that it, too, was waiting."""

TERMINATED = 128 + signal.SIGTERM
"""The exit status of a process that has ended as SIGTERM asks: in good order."""

_POLL = 0.02
"""Seconds between two looks into the store. Its own wait would write a warning for each miss."""

_LONGEST = 80
"""Characters of what a peer says that it was doing."""

_FINISHED, _FAILED = "finished", "failed"
_GIVEN_UP = "given up"


def say_left(store: Store, rank: int, finished: bool) -> None:
    """Tell the others that ``rank`` leaves: orderly if ``finished``, else with an exception."""
    with contextlib.suppress(RuntimeError):  # the store may be gone with who served it
        store.set(f"left/{rank}", _FINISHED if finished else _FAILED)


def say_failed(store: Store, rank: int, error: BaseException) -> None:
    """Tell the others that an exception ends ``rank``; before it closes anything."""
    with contextlib.suppress(RuntimeError):
        store.set(f"failed/{rank}", described(error))


def failure_of(store: Store, rank: int) -> str:
    """Return the exception that has ended ``rank``, as it has said; empty if it has not."""
    if not store.has(f"failed/{rank}"):
        return ""
    try:
        # It goes into a message of one line, and anybody may write to the store.
        return printable(store.get(f"failed/{rank}", PATIENCE), LONGEST_ERROR)
    except TimeoutError:
        return ""


def first_failed(store: Store, ranks: Iterable[int]) -> tuple[int, str] | None:
    """Return the first of ``ranks`` that failed by itself, and its exception; None if none did.

    One that ended by a `PeerError` had waited for another.
    """
    failures = ((rank, failure_of(store, rank)) for rank in ranks)
    own = (each for each in failures if each[1] and not each[1].startswith("PeerError"))
    return next(own, None)


def has_left(store: Store, rank: int) -> bool:
    """Whether ``rank`` has said that it leaves, in whatever way."""
    return store.has(f"left/{rank}")


def has_finished(store: Store, rank: int) -> bool:
    """Whether ``rank`` has left in an orderly way: its work was done."""
    if not has_left(store, rank):
        return False
    try:
        return store.get(f"left/{rank}", PATIENCE) == _FINISHED
    except TimeoutError:
        return False


def finished_text(rank: int, finished: int, waiting_in: str) -> str:
    """Return what ``rank`` says when it waits for one that will send nothing any more."""
    return (
        f"rank {rank}: rank {finished} has finished (its script ended, or called sys.exit() or "
        f"wingbeat.shutdown()) while this rank still trains and waits for it in {waiting_in}: "
        f"see what rank {finished} wrote last; if it had fewer batches, give each worker as many, "
        "or train inside `with model.join():`"
    )


class Blame:
    """Finds the worker at the end of the chain of waits.

    Each worker that fails publishes whom it was waiting for. A worker that was waiting itself is
    not the culprit; the first that published nothing is.

    Args:
        store: where the workers publish it.
        rank: this worker, counted among all of the world, as are all ranks here.
        size: how many workers the world has.
        timeout: seconds that no wait here may exceed.
        room: what the keys begin with, where only the members of a group have failed each other.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: float, room: str = "") -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._patience = min(PATIENCE, timeout)
        self._room = room

    def publish(self, peer: int, doing: str = "") -> None:
        """Tell the others that this rank failed while it waited for ``peer`` in ``doing``."""
        with contextlib.suppress(RuntimeError):  # the store may be gone with who served it
            self._store.set(f"{self._room}waited/{self._rank}", f"{peer} {doing}")
            if self._room:
                self.give_up()

    def give_up(self) -> None:
        """Tell the other members of a group that its sums will never be complete."""
        with contextlib.suppress(RuntimeError):
            if not self._store.has(f"{self._room}{_GIVEN_UP}"):
                self._store.set(f"{self._room}{_GIVEN_UP}", str(self._rank))

    def given_up(self) -> int | None:
        """Return who has failed first in this room; None if nobody says so."""
        if not self._store.has(f"{self._room}{_GIVEN_UP}"):
            return None
        try:
            rank = int(self._store.get(f"{self._room}{_GIVEN_UP}", self._patience))
        except (TimeoutError, ValueError):
            return None
        return rank if 0 <= rank < self._size else None

    def whom(self, rank: int) -> int | None:
        """Return for whom ``rank`` waited when it failed, as it has said; None if nothing yet."""
        return self._read("waited", rank)

    def left(self, rank: int) -> bool:
        """Whether ``rank`` has said that it leaves, in whatever way."""
        return has_left(self._store, rank)

    def doing(self, rank: int) -> str:
        """Return in what ``rank`` was waiting when it failed, as it has said; empty if nothing."""
        if not self._store.has(f"{self._room}waited/{rank}"):
            return ""
        try:
            said = self._store.get(f"{self._room}waited/{rank}", self._patience)
            return printable(said.partition(" ")[2], _LONGEST)
        except TimeoutError:
            return ""

    def culprit(self, peer: int) -> int:
        """Return who is to blame, when this rank has waited for ``peer`` and said so.

        Asked again in a room, it returns what it has found there before: the others had their time.

        When the waits lead back to this rank, all have waited for each other and none is to
        blame more than another; then it is ``peer``, of which this rank knows at first hand.
        """
        if self._room and (found := self._read("culprit", self._rank)) is not None:
            return found
        found = self._followed(peer)
        if self._room:
            with contextlib.suppress(RuntimeError):
                self._store.set(f"{self._room}culprit/{self._rank}", str(found))
        return found

    def _followed(self, peer: int) -> int:
        """Return who is at the end of the waits that begin with this rank's for ``peer``."""
        first, seen = peer, {self._rank}
        while peer not in seen:
            seen.add(peer)
            further = self._waited(peer)
            if further is None:
                return peer
            peer = further
        return first if peer == self._rank else peer

    def failure(self, rank: int) -> str:
        """Return the exception that has ended ``rank``, as it has said; empty if it has not."""
        return failure_of(self._store, rank)

    def finished(self, rank: int) -> bool:
        """Whether ``rank`` has left in an orderly way, and not because it waited in vain."""
        return has_finished(self._store, rank) and self.whom(rank) is None

    def _waited(self, peer: int) -> int | None:
        """Return whom ``peer`` was waiting for; None if it does not say so."""
        deadline = time.monotonic() + self._patience
        while True:
            # Asked in this order: who has waited says so before it leaves.
            nothing_follows = has_left(self._store, peer) or time.monotonic() >= deadline
            if self._store.has(f"{self._room}waited/{peer}"):
                return self._read("waited", peer)
            if nothing_follows:
                return None
            time.sleep(_POLL)

    def _read(self, what: str, peer: int) -> int | None:
        """Return the rank that ``peer`` has said under a name; None if it has not, or no rank."""
        key = f"{self._room}{what}/{peer}"
        if not self._store.has(key):
            return None
        try:
            said = self._store.get(key, self._patience)
            further = int(said.partition(" ")[0])
        except (TimeoutError, ValueError):
            return None
        return further if 0 <= further < self._size else None


_STORE_S = 2.0
"""Seconds that the store may take to return what is there."""


def say_waiting(store: Store, rank: int, peer: int | None) -> None:
    """Publish for whom ``rank`` has waited for long; None: it does not wait any more."""
    with contextlib.suppress(RuntimeError, TimeoutError):  # the store may be gone
        store.set(f"waiting/{rank}", "" if peer is None else str(peer))


def awaited(store: Store, rank: int, peer: int) -> int | None:
    """Return the worker that ``rank`` waits for in the end, and that waits for nobody itself.

    None if those who wait for each other are a ring, ``rank`` among them or not.
    """
    seen = {rank}
    while peer not in seen:
        seen.add(peer)
        further = _read(store, peer)
        if further is None:
            return peer
        peer = further
    return None


def is_worth_waiting(store: Store, rank: int, peer: int) -> bool:
    """Whether the worker at the end of the waits of ``rank`` for ``peer`` lives, and answers."""
    last = awaited(store, rank, peer)
    return last is not None and lives(store, last)


def _read(store: Store, rank: int) -> int | None:
    key = f"waiting/{rank}"
    with contextlib.suppress(RuntimeError, TimeoutError):
        said = store.get(key, _STORE_S) if store.has(key) else ""
        return number(said, 9)
    return None


LONGEST = 10.0
"""Timeouts of `init` for which a peer that lives is waited for: then it counts as stuck."""

LOGGED_S = 30.0
"""Seconds from one line about a wait to the next; the first comes after as many."""


def stuck_text(me: str, peer: str, what: str, timeout: float) -> str:
    """Return the error of a wait for a peer that lives and does not come."""
    return (
        f"{me}: {peer} lives, and {what} did not come from it for {LONGEST * timeout:g} s "
        f"({LONGEST:g} times the timeout of wingbeat.init()): it stands elsewhere, in a barrier of "
        f"its own or a deadlock; see where with `py-spy dump`, or give a longer timeout"
    )


class Wait:
    """Logs what a wait is for, from 30 s on.

    Args:
        me: what messages call this worker.
        what: what is waited for.
        clock: seconds.
    """

    def __init__(self, me: str, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._me, self._what, self._clock = me, what, clock
        self.begun = clock()
        self._logged = self.begun

    def seconds(self) -> float:
        """Return how long it has lasted."""
        return self._clock() - self.begun

    def look(self, peers: str) -> None:
        """Log it, if it has lasted for so long; ``peers`` is who is waited for."""
        now = self._clock()
        if now - self._logged >= LOGGED_S:
            self._logged = now
            log.warning(
                "%s: has waited for %s of %s for %d s; it lives and is waited for",
                self._me, self._what, peers, round(now - self.begun),
            )  # fmt: skip
