"""The interface of the rendezvous store, through which workers exchange short texts (no torch)."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


class Store(Protocol):
    """A key-value store that all workers reach. It holds text only, never pickles."""

    def set(self, key: str, value: str) -> None:
        """Publish ``value`` under ``key``."""

    def get(self, key: str, seconds: float) -> str:
        """Wait for ``key``.

        Raises:
            TimeoutError: the key was not published within ``seconds``.
        """

    def has(self, key: str) -> bool:
        """Whether ``key`` is published. Does not wait; False if the store has ended."""


@runtime_checkable
class AtomicStore(Store, Protocol):
    """A store with compare-and-set: of several writers of one key, the first one wins."""

    def claim(self, key: str, value: str) -> str:
        """Publish ``value`` unless the key exists; return the published value.

        Raises:
            TimeoutError: the store does not answer.
        """
