"""The rendezvous store, by whose help the workers tell each other small texts (no torch)."""

from __future__ import annotations

from typing import Protocol


class Store(Protocol):
    """A small key-value store that all workers reach; carries text only, never pickles."""

    def set(self, key: str, value: str) -> None:
        """Publish ``value`` under ``key``."""

    def get(self, key: str, seconds: float) -> str:
        """Wait for ``key``.

        Raises:
            TimeoutError: nobody published it within ``seconds``.
        """

    def has(self, key: str) -> bool:
        """Whether somebody has published ``key``; does not wait. False if the store is gone."""
