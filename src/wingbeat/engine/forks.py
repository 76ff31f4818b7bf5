"""Before a fork, engines finish what is on its way: a child has no threads that could bring it."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Flushed(Protocol):
    """Something that has updates under way: an engine."""

    def flush(self) -> None:
        """Apply them."""


_living: weakref.WeakSet[Flushed] = weakref.WeakSet()

add = _living.add
"""Have this engine flushed before each fork, for as long as it lives."""

discard = _living.discard
"""Leave it alone from now on."""


def _flush_all() -> None:
    for engine in list(_living):
        engine.flush()


os.register_at_fork(before=_flush_all)
