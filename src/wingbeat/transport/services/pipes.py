"""A service's way to the rendezvous store: it asks the worker that started it, by pipes.

A service imports no torch, and the store is torch's. Requests and answers are lines of JSON.
"""

from __future__ import annotations

import json
import time
from typing import IO, Any

from wingbeat.transport.store import Store

_LOOK_S = 0.02


class PipeStore:
    """`Store` of a service, until it says that it asks no more. For one thread at a time.

    Args:
        asks: where requests are written.
        hears: where answers come from.
    """

    def __init__(self, asks: IO[str], hears: IO[str]) -> None:
        self._asks, self._hears = asks, hears

    def set(self, key: str, value: str) -> None:
        """Publish ``value`` under ``key``."""
        self._ask({"set": key, "value": value})

    def get(self, key: str, seconds: float) -> str:
        """Wait for ``key``.

        Raises:
            TimeoutError: nobody published it within ``seconds``.
        """
        deadline = time.monotonic() + seconds
        while (value := self._ask({"read": key})) is None:
            if time.monotonic() >= deadline:
                raise TimeoutError(key)
            time.sleep(_LOOK_S)
        return str(value)

    def has(self, key: str) -> bool:
        """Whether somebody has published ``key``; does not wait."""
        return self._ask({"read": key}) is not None

    def ready(self) -> None:
        """Tell the one that has started this process that nothing will be asked any more."""
        self._ask({"ready": True})

    def _ask(self, request: dict[str, Any]) -> Any:
        try:
            self._asks.write(json.dumps(request) + "\n")
            self._asks.flush()
            return json.loads(self._hears.readline())
        except (OSError, ValueError):  # nobody reads, or the answer was cut off
            raise TimeoutError("the worker that started this service is gone") from None


def _read(key: str, store: Store) -> str | None:
    try:
        return store.get(key, 1.0) if store.has(key) else None
    except TimeoutError:  # refused, or deleted since: as if it were not there
        return None


def answer(line: str, store: Store) -> tuple[str, bool]:
    """Return the answer to a request, and whether it was the last one.

    Raises:
        ValueError: it is no request.
    """
    try:
        request = json.loads(line)
    except RecursionError:
        raise ValueError("no request: nested too deeply") from None
    match request:
        case {"set": str(key), "value": str(value)}:
            store.set(key, value)
            return "true", False
        case {"read": str(key)}:
            return json.dumps(_read(key, store)), False
        case {"ready": True}:
            return "true", True
    raise ValueError(f"no request: {line[:80]!r}")
