"""wingbeat's log messages, on the logger ``wingbeat``.

If a script configures logging, its handlers receive the messages, and a level that it has set for
the logger ``wingbeat`` stays. Otherwise they go to standard error: from rank 0 those from level
INFO on, in lines that begin with ``wingbeat:``, and from other ranks warnings and errors, in lines
that begin with ``wingbeat (rank 3):``. ``WINGBEAT_LOG`` sets one level for all ranks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from wingbeat.errors import unknown

log = logging.getLogger("wingbeat")
"""The logger of the whole package."""

VARIABLE = "WINGBEAT_LOG"
"""Environment variable: the level from which on messages are logged, on all ranks."""

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "off": logging.CRITICAL + 1,
}
"""Values of the variable, and the levels of `logging` that they set."""


EVENTS = {
    "joined": logging.DEBUG,
    "rejoined": logging.INFO,
    "left": logging.INFO,
    "lost": logging.WARNING,
    "returned": logging.WARNING,
    "excluded": logging.WARNING,
    "path-cut": logging.WARNING,
    "path-restored": logging.WARNING,
    "generator-lost": logging.WARNING,
    "generator-started": logging.WARNING,
    "terminated": logging.INFO,
    "strategy-changed": logging.INFO,
}
"""The names of events, with their levels; ``docs/how-to/monitor.md`` states what they mean."""

_incarnation = 0


def set_incarnation(number: int) -> None:
    """Set the number of processes that had this process's rank before it, for `log_event`."""
    global _incarnation
    _incarnation = number


def log_event(event: str, text: str, *, rank: int, incarnation: int | None = None) -> None:
    """Log a line that ends in ``[event=lost rank=1 incarnation=0]``.

    ``rank`` is the worker that the event concerns, and ``incarnation`` the number of processes that
    had this rank before; None: that of this process. The record has ``event``, ``rank`` and
    ``incarnation`` as attributes.

    >>> log_event("left", "rank 0: rank 1 has finished", rank=1, incarnation=0)
    """
    number = _incarnation if incarnation is None else incarnation
    fields = {"event": event, "rank": rank, "incarnation": number}
    shown = " ".join(f"{name}={value}" for name, value in fields.items())
    log.log(EVENTS[event], "%s [%s]", text, shown, extra=fields)


class _Fallback(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes nothing if the script has a handler."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


def chosen_level(env: Mapping[str, str] = os.environ) -> int | None:
    """Return the level that ``WINGBEAT_LOG`` sets; None without it.

    A `UsageError` if it has another value.
    """
    name = env.get(VARIABLE, "")
    if name and name.lower() not in LEVELS:
        raise unknown("level", name, LEVELS, where=VARIABLE)
    return LEVELS[name.lower()] if name else None


def log_to_stderr(process: str = "", *, leads: bool = True) -> None:
    """Log to standard error, unless the script has configured logging.

    Args:
        process: name of this process in its lines, such as ``rank 3``; a process that leads shows
            it only if all ranks log the same levels (``WINGBEAT_LOG``).
        leads: whether its messages from level INFO on are logged by default, as rank 0's; or only
            warnings and errors.

    Raises:
        UsageError: ``WINGBEAT_LOG`` has an unknown value.
    """
    level = chosen_level()
    if log.handlers or log.level != logging.NOTSET:
        return
    handler = _Fallback()
    shown = f" ({process})" if process and (level is not None or not leads) else ""
    handler.setFormatter(logging.Formatter(f"wingbeat{shown}: %(message)s"))
    log.addHandler(handler)
    if level is not None:
        log.setLevel(level)
    elif leads:
        log.setLevel(logging.INFO)
    else:  # the script's handlers may receive more
        handler.setLevel(logging.WARNING)
