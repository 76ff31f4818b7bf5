"""wingbeat's log messages, on the logger ``wingbeat``.

If a script configures logging, its handlers receive the messages from level INFO on, unless the
script sets another level for the logger ``wingbeat``. Otherwise rank 0 writes them to standard
error, in lines that begin with ``wingbeat:``.
"""

from __future__ import annotations

import logging

log = logging.getLogger("wingbeat")
"""The logger of the whole package."""


class _Fallback(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes nothing if the script has a handler."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


def log_to_stderr() -> None:
    """Log to standard error, unless the script has configured logging."""
    if log.handlers or log.level != logging.NOTSET:
        return
    handler = _Fallback()
    handler.setFormatter(logging.Formatter("wingbeat: %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
