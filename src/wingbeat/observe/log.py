"""What wingbeat has to say while it runs, on the logger called ``wingbeat``.

In a script that configures logging, its handlers get it, from level INFO on unless the script gives
the logger ``wingbeat`` another level. In one that does not, rank 0 says it on standard error, as a
line that begins with ``wingbeat:``.
"""

from __future__ import annotations

import logging

log = logging.getLogger("wingbeat")
"""The logger of everything in wingbeat."""


class _Fallback(logging.StreamHandler):  # type: ignore[type-arg]
    """Silent as soon as the script has a handler of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


def speak() -> None:
    """Say what is logged on standard error, unless the script has decided otherwise."""
    if log.handlers or log.level != logging.NOTSET:
        return
    handler = _Fallback()
    handler.setFormatter(logging.Formatter("wingbeat: %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
