"""A record of lost workers and their failures, logged while the others train."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable

from wingbeat.observe.log import log
from wingbeat.transport import graceful_shutdown
from wingbeat.transport.failures import (
    ANSWER_TIMEOUT_S,
    first_failed,
    has_exited,
    has_finished,
    published_failure,
)
from wingbeat.transport.store import Store
from wingbeat.transport.world import World

_SILENT = "gave no sign in time, or has ended without a word"

_POLL_S = 0.05
"""Seconds between two reads of the store."""

_STORE_S = 1.0
"""Seconds to wait for the store when this worker exits."""


class Departures:
    """One worker's record of lost workers, and of the exceptions that ended them.

    A thread reads the store, which may be lost with the worker, or respond late. Without a store,
    nothing is read. ``gone`` maps the rank of each lost worker to how it exited, unless it
    finished.
    """

    def __init__(
        self,
        store: Store | None,
        me: str,
        size: int = 0,
        *,
        name: Callable[[int], str] = "rank {}".format,
        say: Callable[[str], None] = log.warning,
    ) -> None:
        self._store, self._me, self._size = store, me, size
        self._name, self._say = name, say
        self.gone: dict[int, str] = {}
        self._asking: list[threading.Thread] = []

    def lost(self, worker: int, how: str = "") -> None:
        """Log that a worker is lost, with the exception that ended it; does not block.

        ``how`` is the reason, as a predicate; empty if it is unknown, and the worker may have
        finished.
        """
        if worker in self.gone:
            return
        self.gone[worker] = how or _SILENT
        if self._store is None:
            self._warn(worker)
            return
        thread = threading.Thread(
            target=self._ask, args=(self._store, worker, how), name="wingbeat-departures",
            daemon=True,
        )  # fmt: skip
        self._asking.append(thread)
        with contextlib.suppress(RuntimeError):  # the interpreter is exiting
            thread.start()

    def back(self, worker: int) -> None:
        """Log that a lost worker has rejoined."""
        if self.gone.pop(worker, None) is not None:
            self._say(f"{self._me}: {self._name(worker)} is back")

    def how(self, worker: int) -> str:
        """Return how a lost worker exited. Blocks on the store."""
        failure = "" if self._store is None else published_failure(self._store, worker)
        return f"failed with {failure}" if failure else self.gone.get(worker, _SILENT)

    def blame(self) -> str | None:
        """Return the worker that failed first, with its exception, or None. Blocks on the store."""
        if self._store is None or (found := first_failed(self._store, range(self._size))) is None:
            return None
        return f"{self._name(found[0])} failed with {found[1]}"

    def close(self) -> None:
        """Log the workers that are still lost in one line, unless this worker has failed."""
        if graceful_shutdown.is_failing():
            return
        for thread in self._asking:
            if thread.ident is not None:
                thread.join(_STORE_S)
        if self.gone:
            said = ", ".join(f"{self._name(w)} {how}" for w, how in sorted(self.gone.items()))
            self._say(f"{self._me}: trained to the end without all workers: {said}")

    def _ask(self, store: Store, worker: int, how: str) -> None:
        """Read how a worker exited, and log it."""
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while not (failure := published_failure(store, worker)):
            over = has_exited(store, worker) or time.monotonic() >= deadline
            if how or over:
                break
            time.sleep(_POLL_S)
        if not failure and not how and has_finished(store, worker):
            self.gone.pop(worker, None)
            log.info("%s: %s has finished; the others go on", self._me, self._name(worker))
            return
        if failure and worker in self.gone:
            self.gone[worker] = f"failed with {failure}"
        self._warn(worker)

    def _warn(self, worker: int) -> None:
        how = self.gone.get(worker)
        if how is not None:  # otherwise it has rejoined
            self._say(f"{self._me}: {self._name(worker)} {how}; the others go on without it")


_made: weakref.WeakKeyDictionary[World, Departures] = weakref.WeakKeyDictionary()


def departures_of(world: World) -> Departures:
    """Return the record of this worker in its job, shared by all models that it trains."""
    while world.parent is not None:
        world = world.parent
    if world not in _made:
        store = world.store if world.group_store is None else world.group_store()
        _made[world] = Departures(store, f"rank {world.rank}", world.size)
        world.on_close(_made[world].close)
    return _made[world]
