"""The thread that lets a mailbox go on while its user does something else."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

from wingbeat.transport.messages.carrier import Carrier

BUSY_S, IDLE_S = 0.005, 0.02
"""Seconds after which the keeper looks again: while something goes on, and otherwise."""

AWAKE_S = 1.0
"""Seconds after a frame for which more are expected."""


class Kept(Protocol):
    """What a keeper looks after."""

    def go_on(self) -> float:
        """Do what is to be done now; return after how many seconds to come again."""


def start(kept: weakref.ref[Kept], ended: threading.Event) -> threading.Thread:
    """Start the thread; it ends when ``ended`` is set, or nobody else uses what it keeps."""
    thread = threading.Thread(target=_keep, args=(kept, ended), name="wingbeat-mail", daemon=True)
    thread.start()
    return thread


def forget(ended: threading.Event, carrier: Carrier) -> None:
    """End what a mailbox has started, when it is closed or collected."""
    ended.set()
    carrier.close()


def _keep(kept: weakref.ref[Kept], ended: threading.Event) -> None:
    period = BUSY_S
    while not ended.wait(period):
        own = kept()
        if own is None:
            return
        period = own.go_on()
        del own
