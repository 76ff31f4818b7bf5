"""Whom a worker really waits for: peers that wait themselves say so in the store, and for whom.

A peer that evaluates or saves is waited for; peers that wait for each other are not, as after
calls that differ between ranks.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from wingbeat.transport.incarnation import lives
from wingbeat.transport.text import number

if TYPE_CHECKING:
    from wingbeat.transport.store import Store

_STORE_S = 2.0
"""Seconds that the store may take to return what is there."""


def say_waiting(store: Store, rank: int, peer: int | None) -> None:
    """Publish for whom ``rank`` has waited for long; None: it does not wait any more."""
    with contextlib.suppress(RuntimeError, TimeoutError):  # the store may be gone
        store.set(f"waiting/{rank}", "" if peer is None else str(peer))


def awaited(store: Store, rank: int, peer: int) -> int | None:
    """Return the worker that ``rank`` waits for in the end, and that waits for nobody itself.

    None if those who wait for each other are a ring, ``rank`` among them or not.
    """
    seen = {rank}
    while peer not in seen:
        seen.add(peer)
        further = _read(store, peer)
        if further is None:
            return peer
        peer = further
    return None


def is_worth_waiting(store: Store, rank: int, peer: int) -> bool:
    """Whether the worker at the end of the waits of ``rank`` for ``peer`` lives, and answers."""
    last = awaited(store, rank, peer)
    return last is not None and lives(store, last)


def _read(store: Store, rank: int) -> int | None:
    key = f"waiting/{rank}"
    with contextlib.suppress(RuntimeError, TimeoutError):
        said = store.get(key, _STORE_S) if store.has(key) else ""
        return number(said, 9)
    return None
