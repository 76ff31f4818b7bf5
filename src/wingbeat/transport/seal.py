"""MACs of what the store holds: a value that was not written with the job's key is refused."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping

from wingbeat.errors import UsageError

KEY_VARIABLE = "WINGBEAT_JOB_KEY"
"""Names the variable that holds the job's key, the same on all workers."""

MARK = "hmac-sha256:"
"""What every sealed value begins with."""

_SHORTEST = 16
_DIGITS = 64


class Seal:
    """Adds a MAC to each value, over a context, the name that it is stored under, and the value.

    A value that is copied to another name, another job or another `init` is refused. An earlier
    value of the same name is not: its MAC is right.

    Args:
        key: the job's.
        context: what the values belong to.
    """

    def __init__(self, key: bytes, context: str) -> None:
        self._key, self._context = key, context

    def close(self, name: str, value: str) -> str:
        """Return ``value`` with its MAC, as it is stored under ``name``."""
        return f"{MARK}{self._mac(name, value)}:{value}"

    def open(self, name: str, text: str) -> str | None:
        """Return the value in what is stored under ``name``; None if its MAC is not right."""
        value = text[len(MARK) + _DIGITS + 1 :]
        # All of it is compared: the mark and the MAC are in what `close` returns.
        right = self.close(name, value)
        return value if hmac.compare_digest(right.encode(), text.encode()) else None

    def _mac(self, name: str, value: str) -> str:
        signed = json.dumps([self._context, name, value])
        return hmac.new(self._key, signed.encode(), hashlib.sha256).hexdigest()


def job_key(env: Mapping[str, str]) -> bytes | None:
    """Return the job's key from an environment; None if it has none.

    Raises:
        UsageError: it is too short to be one.
    """
    key = env.get(KEY_VARIABLE)
    if key is None:
        return None
    if len(key) < _SHORTEST:
        raise UsageError(
            f"{KEY_VARIABLE} has {len(key)} characters: {_SHORTEST} or more are needed, the same "
            "on all workers, as `openssl rand -hex 32` prints"
        )
    return key.encode("utf-8", "surrogateescape")
