"""Error texts of libraries, shortened for one-line messages."""

from __future__ import annotations

from wingbeat.schema import printable

MAX_ERROR_CHARS = 200
"""Maximum characters of an exception that are sent to other workers."""


def first_line(err: BaseException) -> str:
    """Return an exception's message without the stack trace and advice that torch may append."""
    text = str(err).strip().splitlines()
    line = text[0].partition(". This is typically")[0] if text else type(err).__name__
    # The path in "[/path/to/gloo/file.cc:123] what happened" does not help the user.
    return line.partition("] ")[2] if line.startswith("[") and "] " in line else line


def parse_number(text: str, digits: int) -> int | None:
    """Parse a peer's number of at most ``digits`` digits; None if it is invalid."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= digits else None


def describe_error(err: BaseException) -> str:
    """Return an exception's type and first line, as published to other workers."""
    kind = type(err).__name__
    try:
        line = first_line(err)
    except Exception:  # its __str__ is the user's
        line = kind
    return printable((kind if line == kind else f"{kind}: {line}")[:MAX_ERROR_CHARS])
