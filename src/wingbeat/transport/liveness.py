"""How long a peer that lives is waited for.

A peer that evaluates, saves or compiles is silent and lives. So silence for the timeout of `init`
ends a wait only if the process is gone, or its host cannot be reached.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from wingbeat.observe.log import log

LONGEST = 10.0
"""Timeouts of `init` for which a peer that lives is waited for: then it counts as stuck."""

LOGGED_S = 30.0
"""Seconds from one line about a wait to the next; the first comes after as many."""


def stuck_text(me: str, peer: str, what: str, timeout: float) -> str:
    """Return the error of a wait for a peer that lives and does not come."""
    return (
        f"{me}: {peer} lives, and {what} did not come from it for {LONGEST * timeout:g} s "
        f"({LONGEST:g} times the timeout of wingbeat.init()): it stands elsewhere, in a barrier of "
        f"its own or a deadlock; see where with `py-spy dump`, or give a longer timeout"
    )


class Wait:
    """Logs what a wait is for, from 30 s on.

    Args:
        me: what messages call this worker.
        what: what is waited for.
        clock: seconds.
    """

    def __init__(self, me: str, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._me, self._what, self._clock = me, what, clock
        self.begun = clock()
        self._logged = self.begun

    def seconds(self) -> float:
        """Return how long it has lasted."""
        return self._clock() - self.begun

    def look(self, peers: str) -> None:
        """Log it, if it has lasted for so long; ``peers`` is who is waited for."""
        now = self._clock()
        if now - self._logged >= LOGGED_S:
            self._logged = now
            log.warning(
                "%s: has waited for %s of %s for %d s; it lives and is waited for",
                self._me, self._what, peers, round(now - self.begun),
            )  # fmt: skip
