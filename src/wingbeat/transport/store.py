"""The rendezvous store, by whose help the workers tell each other small texts (no torch)."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


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


@runtime_checkable
class Ledger(Store, Protocol):
    """A store in which of several that publish under one key the first is right."""

    def claim(self, key: str, value: str) -> str:
        """Publish ``value`` unless somebody has; return what is published.

        Raises:
            TimeoutError: the store does not answer.
        """
