"""The rendezvous store, by whose help the workers tell each other small texts."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from wingbeat.transport.gloo import first_line


class TorchStore:
    """`Store` on top of torch's own, whose values are bytes."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def set(self, key: str, value: str) -> None:
        """Publish ``value`` under ``key``."""
        self._store.set(key, value)

    def get(self, key: str, seconds: float) -> str:
        """Wait for ``key``.

        Raises:
            TimeoutError: nobody published it within ``seconds``.
        """
        try:
            self._store.wait([key], timedelta(seconds=seconds))
            value: bytes = self._store.get(key)
            return value.decode()
        except (RuntimeError, UnicodeDecodeError) as err:
            raise TimeoutError(f"{key}: {first_line(err)}") from None

    def has(self, key: str) -> bool:
        """Whether somebody has published ``key``; does not wait. False if the store is gone."""
        try:
            return bool(self._store.check([key]))
        except RuntimeError:
            return False
