"""Blocking calls of mailboxes, for bodies of tests."""

from __future__ import annotations

import time
from collections.abc import Iterable

from helpers.waiting import PATIENCE, until
from wingbeat.transport.messages import Mailbox, Message, Posted


def receive(box: Mailbox, seconds: float = PATIENCE) -> Message:
    """Return the next message; fail if there is none in time."""
    deadline = time.monotonic() + seconds
    while (message := box.next(max(0.0, deadline - time.monotonic()))) is None:
        assert time.monotonic() < deadline, f"no message within {seconds:g} s: {dict(box.lost)}"
    return message


def arrive(posted: Iterable[Posted]) -> None:
    """Wait until the messages have arrived."""
    waiting = list(posted)
    until(lambda: all(each.arrived for each in waiting))
