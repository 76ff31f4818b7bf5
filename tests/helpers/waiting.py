"""Waits for what another thread or process does, with a deadline."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

PATIENCE = 20.0
"""Seconds that anything may take."""


def until(is_so: Callable[[], object], what: Callable[[], str] = lambda: "") -> None:
    """Wait until ``is_so()``; fail with ``what()`` if it is not in time."""
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < deadline, what()
        time.sleep(0.002)


def is_collected(reference: weakref.ref[Any]) -> bool:
    """Return whether an object that nothing should hold goes within five seconds."""
    for _ in range(500):  # another thread may be collecting
        if gc.collect() is not None and reference() is None:
            return True
        time.sleep(0.01)
    return False
