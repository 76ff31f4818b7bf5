"""A thread in the background whose unexpected end is an error of the job, and not only a traceback.

For a thread that watches something: one that has ended says nothing any more, and nothing to say is
what it usually has. Its owner asks for `failure` where training comes by, and raises it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from wingbeat.transport.text import first_line

_log = logging.getLogger(__name__)


class BackgroundThread(threading.Thread):
    """A daemon thread that keeps the exception which has ended it.

    Args:
        work: what it runs; handles the errors that it expects.
        name: of the thread; part of the failure's text.
        died: called in this thread after ``work`` has raised, for example to end a wait.

    Attributes:
        failure: how it has ended, one line; empty unless ``work`` has raised.
    """

    def __init__(
        self, work: Callable[[], None], name: str, died: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._work, self._died = work, died
        self.failure = ""

    def run(self) -> None:
        """Run the work, and keep what it raises."""
        try:
            self._work()
        except Exception as error:
            failure = f"thread {self.name} has ended by {type(error).__name__}: {first_line(error)}"
            _log.exception("%s", failure)
            self.failure = f"{failure}; report the traceback in the log, and start the job again"
            self._died()
