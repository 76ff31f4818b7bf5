"""Waits for what another thread or process does, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 20.0
"""Seconds that anything may take."""


def until(is_so: Callable[[], object], what: Callable[[], str] = lambda: "") -> None:
    """Wait until ``is_so()``; fail with ``what()`` if it is not in time."""
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < deadline, what()
        time.sleep(0.002)
