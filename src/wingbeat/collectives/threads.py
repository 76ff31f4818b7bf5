"""Threads that run callbacks and background work of collectives."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable

from wingbeat.observe.log import log


def run_callback(callback: Callable[[], None]) -> None:
    """Call it; what it raises is its author's, and must not end the thread that others wait for."""
    try:
        callback()
    except Exception:
        log.exception("a callback of a collective failed")


KEPT_S = 2.0
"""Seconds for which a thread without work waits for more before it ends."""


class Threads:
    """Runs each piece of work at once, in a thread that is free or else in a new one."""

    def __init__(self, name: str, kept_s: float = KEPT_S) -> None:
        self._name = name
        self._kept_s = kept_s
        self._counter = itertools.count()
        self.forget()

    def forget(self) -> None:
        """Start anew: a forked child has none of the threads, and the work is its parent's."""
        self._changed = threading.Condition()
        self._free = 0
        self._work: deque[Callable[[], None]] = deque()

    def start(self, work: Callable[[], None]) -> None:
        """Run ``work`` in a thread of its own; it must not raise."""
        with self._changed:
            self._work.append(work)
            if self._free >= len(self._work):
                self._changed.notify()
                return
        name = f"{self._name}-{next(self._counter)}"
        # Daemons: a thread that waits for more work must not keep the process from ending.
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._free += 1
                self._changed.wait_for(lambda: self._work, self._kept_s)
                self._free -= 1
                if not self._work:
                    return
                work = self._work.popleft()
            work()
            del work  # it must not be kept alive by a thread that waits


class InTurn:
    """Does pieces of work in the order in which they came, in one thread at a time.

    Several at once would only take more processors from training.

    Args:
        threads: where to get a thread from while there is something to do.
    """

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._anew()

    def forget(self) -> None:
        """Start anew: a forked child has none of the threads, and the work is its parent's."""
        self._threads.forget()
        self._anew()

    def _anew(self) -> None:
        self._lock = threading.Lock()
        self._work: deque[Callable[[], None]] = deque()
        self._running = False

    def start(self, work: Callable[[], None]) -> None:
        """Have ``work`` done after all that came before; what it raises is logged."""
        with self._lock:
            self._work.append(work)
            if self._running:
                return
            self._running = True
        self._threads.start(self._run)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._work:
                    self._running = False
                    return
                work = self._work.popleft()
            run_callback(work)
            del work  # it must not be kept alive by a thread that waits
