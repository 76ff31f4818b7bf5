"""The rendezvous store, on top of torch's."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

from wingbeat.transport.store import Store
from wingbeat.transport.text import first_line

_ABSENT = "?"
"""What no key has as its value."""

_SOONEST_S, _LATEST_S = 0.001, 0.1
"""Seconds between two looks into the store: at first, and after some waiting."""


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

    def claim(self, key: str, value: str) -> str:
        """Publish ``value`` unless somebody has; return what is published.

        Raises:
            TimeoutError: the store does not answer.
        """
        return self.replace(key, "", value)

    def replace(self, key: str, before: str, value: str) -> str:
        """Publish ``value`` if ``before`` is what is published; return what is published then.

        Raises:
            TimeoutError: the store does not answer.
        """
        try:
            found: bytes = self._store.compare_set(key, before, value)
            return found.decode()
        except (RuntimeError, UnicodeDecodeError) as err:
            raise TimeoutError(f"{key}: {first_line(err)}") from None


class SharedStore(TorchStore):
    """As `TorchStore`, for many threads: a wait inside the store would lock it for all others."""

    def get(self, key: str, seconds: float) -> str:
        """As `TorchStore.get`; looks again and again."""
        deadline, pause = time.monotonic() + seconds, _SOONEST_S
        try:
            while (value := read(self._store, key)) is None:
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"{key}: not there after {seconds:g} s")
                time.sleep(pause)
                pause = min(2 * pause, _LATEST_S)
            return value.decode()
        except (RuntimeError, UnicodeDecodeError) as err:
            raise TimeoutError(f"{key}: {first_line(err)}") from None


def keeps_everything(store: Store) -> bool:
    """Whether what is set again stays there too, as in a file that is only added to."""
    inner = store._store if isinstance(store, TorchStore) else None
    while isinstance(inner, dist.PrefixStore):
        inner = inner.underlying_store
    return isinstance(inner, dist.FileStore)


def read(store: dist.Store, key: str) -> bytes | None:
    """Return what is under ``key``, without a wait; None if nothing is.

    Raises:
        RuntimeError: the store is gone.
    """
    # Somebody may delete it after a look, so it is looked for and read in one step.
    value: bytes = store.compare_set(key, _ABSENT, _ABSENT)
    return None if value == _ABSENT.encode() else value
