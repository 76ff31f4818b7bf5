"""Who failed first: when one worker is gone, its neighbours fail too, and theirs after them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wingbeat.transport.world import Store

PATIENCE = 2.0
"""Seconds to give another worker to say that it, too, was waiting."""


class Blame:
    """Finds the worker at the end of the chain of waits.

    Each worker that fails publishes whom it was waiting for. A worker that was waiting itself is
    not the culprit; the first that published nothing is.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: float) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._patience = min(PATIENCE, timeout)

    def publish(self, peer: int) -> None:
        """Tell the others that this rank failed while it waited for ``peer``."""
        with contextlib.suppress(RuntimeError):  # the store may be gone with who served it
            self._store.set(f"waited/{self._rank}", str(peer))

    def culprit(self, peer: int) -> int:
        """Return who is to blame, when this rank has waited for ``peer`` and said so."""
        seen = {self._rank}
        while peer not in seen:
            seen.add(peer)
            try:
                further = int(self._store.get(f"waited/{peer}", self._patience))
            except (TimeoutError, ValueError):
                return peer
            if not 0 <= further < self._size:
                return peer
            peer = further
        return peer
