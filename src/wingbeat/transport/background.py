"""Background threads whose failure is an error of the job.

A thread that only reports events looks healthy after it has died. Its owner checks `failure` in the
training thread and raises it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from wingbeat.transport.text import first_line

_log = logging.getLogger(__name__)


class BackgroundThread(threading.Thread):
    """A daemon thread that stores the exception that ended it.

    Args:
        work: the function to run; it handles the errors that it expects.
        name: name of the thread; part of the failure's text.
        died: called in this thread after ``work`` raised, for example to end a wait.

    Attributes:
        failure: one line about the exception that ended it; empty while ``work`` has not raised.
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
