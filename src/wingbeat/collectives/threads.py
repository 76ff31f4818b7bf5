"""Threads for callbacks and background work of collectives."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable

from wingbeat.observe.log import log


def run_callback(callback: Callable[[], None]) -> None:
    """Call ``callback`` and log any exception, which must not end the calling thread."""
    try:
        callback()
    except Exception:
        log.exception("a callback of a collective failed")


IDLE_TIMEOUT_S = 2.0
"""Seconds for which an idle thread waits for work before it ends."""


class ThreadPool:
    """Runs each callable immediately, in an idle thread or a new one."""

    def __init__(self, name: str, kept_s: float = IDLE_TIMEOUT_S) -> None:
        self._name = name
        self._kept_s = kept_s
        self._counter = itertools.count()
        self.reset_after_fork()

    def reset_after_fork(self) -> None:
        """Reset in a forked child, which has no threads and must not run its parent's work."""
        self._changed = threading.Condition()
        self._free = 0
        self._work: deque[Callable[[], None]] = deque()

    def start(self, work: Callable[[], None]) -> None:
        """Run ``work``, which must not raise, in a separate thread."""
        with self._changed:
            self._work.append(work)
            if self._free >= len(self._work):
                self._changed.notify()
                return
        name = f"{self._name}-{next(self._counter)}"
        # Daemons: an idle thread must not keep the process from exiting.
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
            del work  # an idle thread must not hold a reference


class SerialQueue:
    """Runs callables in the order of submission, in one thread that ``threads`` provides.

    Several threads would compete with training for processors.
    """

    def __init__(self, threads: ThreadPool) -> None:
        self._threads = threads
        self._reset()

    def reset_after_fork(self) -> None:
        """Reset in a forked child, which has no threads and must not run its parent's work."""
        self._threads.reset_after_fork()
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._work: deque[Callable[[], None]] = deque()
        self._running = False

    def start(self, work: Callable[[], None]) -> None:
        """Queue ``work``. Exceptions are logged."""
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
            del work  # an idle thread must not hold a reference
