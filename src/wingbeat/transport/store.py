"""The interface of the rendezvous store, through which workers exchange short texts. No torch."""

from __future__ import annotations

import contextlib
from typing import Protocol, runtime_checkable


class Store(Protocol):
    """A key-value store that all workers reach. Values are text, never pickles."""

    def set(self, key: str, value: str) -> None:
        """Publish ``value`` under ``key``."""

    def get(self, key: str, seconds: float) -> str:
        """Wait for ``key``; a `TimeoutError` after ``seconds``."""

    def has(self, key: str) -> bool:
        """Whether ``key`` is published. Does not wait; False if the store is unavailable."""


@runtime_checkable
class AtomicStore(Store, Protocol):
    """A store with compare-and-set: the first of several writers of a key wins."""

    def claim(self, key: str, value: str) -> str:
        """Publish ``value`` unless the key exists; return the published value."""


def again_text(call: str) -> str:
    """Return what to do after ``call`` has failed because the store does not answer."""
    return (
        f"call {call} again once `wingbeat store` runs again; if rank 0 or its launcher served the "
        "store, start the job again from a checkpoint"
    )


_READ_S = 1.0
"""Seconds for a store to return a value that exists."""


def read_value(store: Store, key: str) -> str | None:
    """Return the value of ``key`` if it is published.

    None if it is not, if it is invalid, or if the store is unavailable.
    """
    with contextlib.suppress(TimeoutError, RuntimeError):
        return store.get(key, _READ_S) if store.has(key) else None
    return None
