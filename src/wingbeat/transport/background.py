"""Background threads whose failure is an error of the job.

A thread that has ended is not visible to its owner. The owner checks `failure` in the training
thread and raises it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from wingbeat.transport.text import first_line

_log = logging.getLogger(__name__)


class BackgroundThread(threading.Thread):
    """A daemon thread that runs ``work`` and stores the exception that ended it.

    ``died`` is called in this thread after ``work`` raised, for example to end a wait. ``failure``
    is one line about the exception; empty while ``work`` has not raised.
    """

    def __init__(
        self, work: Callable[[], None], name: str, died: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._work, self._died = work, died
        self.failure = ""

    def run(self) -> None:
        """Run the work, and store what it raises."""
        try:
            self._work()
        except Exception as error:
            failure = f"thread {self.name} has ended by {type(error).__name__}: {first_line(error)}"
            _log.exception("%s", failure)
            self.failure = f"{failure}; report the traceback in the log, and start the job again"
            self._died()
