"""Calling what users have handed over, in threads that others wait for."""

from __future__ import annotations

from collections.abc import Callable

from wingbeat.observe.log import log


def run_callback(callback: Callable[[], None]) -> None:
    """Call it; what it raises is its author's, and must not end the thread that others wait for."""
    try:
        callback()
    except Exception:
        log.exception("a callback of a collective failed")
