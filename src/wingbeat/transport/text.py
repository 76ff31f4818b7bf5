"""What libraries say, cut down to what helps a reader."""

from __future__ import annotations

LONGEST_ERROR = 200
"""Characters that are told of an exception."""


def first_line(err: BaseException) -> str:
    """Return an exception's message without the stack trace and advice that torch may append."""
    text = str(err).strip().splitlines()
    line = text[0].partition(". This is typically")[0] if text else type(err).__name__
    # "[/path/to/gloo/file.cc:123] what happened": the path helps nobody here.
    return line.partition("] ")[2] if line.startswith("[") and "] " in line else line


def number(text: str, digits: int) -> int | None:
    """Return the number that a peer sent, of at most so many ``digits``; None if it is none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= digits else None


def printable(text: str, most: int) -> str:
    """Return ``text`` fit for a line: without control characters, cut to ``most`` characters."""
    return "".join(filter(str.isprintable, text[:most]))


def described(err: BaseException) -> str:
    """Return an exception's type and first line, as other workers are told them."""
    kind = type(err).__name__
    try:
        line = first_line(err)
    except Exception:  # its __str__ is the user's
        line = kind
    return printable(kind if line == kind else f"{kind}: {line}", LONGEST_ERROR)
