"""What another user of the same host can do, for tests that run as root."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable

import pytest

NUMBER = 65534
"""The other user and its group."""

needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="needs root, to start a process of another user"
)


def run(call: Callable[[], object]) -> str:
    """Call a function in a process of the other user; return its result or error as text."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NUMBER)
            os.setuid(NUMBER)
            try:
                text = str(call())
            except OSError as error:
                text = type(error).__name__
            os.write(writing, text.encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(child, 0)
    return text
