"""Work that is done beside training, one piece after the other."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from wingbeat.collectives.callbacks import run_callback
from wingbeat.collectives.threads import Threads


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
