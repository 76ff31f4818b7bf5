"""What libraries say, cut down to what helps a reader."""

from __future__ import annotations


def first_line(err: BaseException) -> str:
    """Return an exception's message without the stack trace and advice that torch may append."""
    text = str(err).strip().splitlines()
    line = text[0].partition(". This is typically")[0] if text else type(err).__name__
    # "[/path/to/gloo/file.cc:123] what happened": the path helps nobody here.
    return line.partition("] ")[2] if line.startswith("[") and "] " in line else line
