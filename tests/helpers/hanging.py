"""What to do about a test that hangs.

pytest-timeout's signal fails the test from within, and the others go on. Python hears of a signal
only between two of its own steps: a test that blocks in C++ cannot be ended without the whole run.
It is named, and the stacks of all threads are shown.
"""

from __future__ import annotations

import faulthandler
import os
import threading

import pytest

GRACE = 60.0
"""Seconds that a test gets, on top of its timeout, to be ended by the signal and to clean up."""


class LastResort:
    """Ends the run when a test, though timed out, does not end."""

    def __init__(self, grace: float = GRACE) -> None:
        self._grace = grace
        # Where output goes while nothing captures it, as at the time this is made.
        self._stderr = os.dup(2)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> object:
        seconds = limit(item)
        if not seconds:
            return (yield)
        naming = threading.Timer(seconds + self._grace, self._name, [item.nodeid])
        naming.daemon = True
        naming.start()
        # By a thread of C++, which needs no interpreter, and so last.
        faulthandler.dump_traceback_later(seconds + self._grace + 1.0, exit=True, file=self._stderr)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()
            naming.cancel()

    def _name(self, nodeid: str) -> None:
        text = f"\n{nodeid} hangs where no signal is heard: the run ends here\n"
        os.write(self._stderr, text.encode())


def limit(item: pytest.Item) -> float:
    """Seconds the test may take; 0 if there is no limit."""
    marker = item.get_closest_marker("timeout")
    if marker is not None:
        return float(marker.args[0] if marker.args else marker.kwargs["timeout"])
    given = item.config.getoption("timeout", default=None)
    return float(given if given is not None else item.config.getini("timeout") or 0)
