"""The rendezvous store on top of torch.distributed, with authentication of its values."""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist

from wingbeat.errors import UsageError
from wingbeat.observe.log import log
from wingbeat.transport.store import Store
from wingbeat.transport.text import first_line

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


_ABSENT = "?"
"""What no key has as its value."""

_SOONEST_S, _LATEST_S = 0.001, 0.1
"""Seconds between two looks into the store: at first, and after some waiting."""

LARGEST = 16 << 20
"""Bytes of a value that is read; the largest that are written are lists of a model's tensors."""

_ATTEMPTS = 16
"""To replace a refused value, before whoever writes it again and again has won."""


class Refused(TimeoutError):
    """What is in the store was not written with the job's key, or is too large."""


class TorchStore:
    """`Store` on top of torch's own, whose values are bytes.

    With a seal a value that was not written with the job's key is as if it were not there: it is
    not returned, `has` says no, and `claim` and `replace` write over it.

    Args:
        store: torch's.
        seal: what adds MACs to values and checks them; None where the job has no key.
    """

    def __init__(self, store: dist.Store, seal: Seal | None = None) -> None:
        self._store, self.seal = store, seal
        self._warned: set[str] = set()

    def set(self, key: str, value: str) -> None:
        """Publish ``value`` under ``key``."""
        self._store.set(key, self._closed(key, value))

    def get(self, key: str, seconds: float) -> str:
        """Wait for ``key``.

        Raises:
            TimeoutError: nobody published it within ``seconds``.
        """
        deadline = time.monotonic() + seconds
        try:
            self._store.wait([key], timedelta(seconds=seconds))
            found: bytes = self._store.get(key)
        except RuntimeError as err:
            raise TimeoutError(f"{key}: {first_line(err)}") from None
        try:
            return self._opened(key, found)
        except Refused:
            if self.seal is None:
                raise
        return self._polled(key, deadline, seconds)  # the right one may yet come

    def has(self, key: str) -> bool:
        """Whether somebody has published ``key``; does not wait. False if the store is gone."""
        try:
            if self.seal is None:
                return bool(self._store.check([key]))
            return self.look(key) is not None
        except (RuntimeError, Refused):
            return False

    def look(self, key: str) -> str | None:
        """Return what somebody has published under ``key``, without a wait; None if nobody has.

        Raises:
            Refused: something is there that this job has not written.
            RuntimeError: the store is gone.
        """
        found = read(self._store, key)
        return None if found is None else self._opened(key, found)

    def claim(self, key: str, value: str) -> str:
        """Publish ``value`` unless somebody has; return what is published.

        Raises:
            TimeoutError: the store does not answer.
        """
        return self.replace(key, "", value)

    def replace(self, key: str, before: str, value: str) -> str:
        """Publish ``value`` if ``before`` is what is published; return what is published then.

        Raises:
            TimeoutError: the store does not answer, or somebody else writes the key all the time.
        """
        new = self._closed(key, value)
        expected: str | bytes = self._closed(key, before) if before else ""
        for _ in range(_ATTEMPTS):
            try:
                found: bytes = self._store.compare_set(key, expected, new)
                return self._opened(key, found)
            except Refused:
                if self.seal is None:
                    raise
                expected = found
            except RuntimeError as err:
                raise TimeoutError(f"{key}: {first_line(err)}") from None
        raise Refused(f"{key}: another process writes it again and again, without the job's key")

    def _closed(self, key: str, value: str) -> str:
        return value if self.seal is None else self.seal.close(key, value)

    def _opened(self, key: str, found: bytes) -> str:
        """Return the value in what was read.

        Raises:
            Refused: it is too large, no text, or not of this job.
        """
        if len(found) > LARGEST:
            why = f"{len(found)} bytes, more than {LARGEST}"
        else:
            try:
                text = found.decode()
                value = text if self.seal is None else self.seal.open(key, text)
                if value is not None:
                    return value
                why = "its MAC is wrong or missing: it was not written with this job's key"
            except UnicodeDecodeError:
                why = "it is no text"
        if key not in self._warned:
            self._warned.add(key)
            log.warning("the store's value of %s is refused: %s", key, why)
        raise Refused(f"{key}: {why}")

    def _polled(self, key: str, deadline: float, seconds: float) -> str:
        """As `get`, by looking again and again."""
        pause = _SOONEST_S
        while True:
            try:
                if (value := self.look(key)) is not None:
                    return value
            except Refused:
                if self.seal is None or time.monotonic() >= deadline:
                    raise
            except RuntimeError as err:
                raise TimeoutError(f"{key}: {first_line(err)}") from None
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{key}: not there after {seconds:g} s")
            time.sleep(pause)
            pause = min(2 * pause, _LATEST_S)


class SharedStore(TorchStore):
    """As `TorchStore`, for many threads: a wait inside the store would lock it for all others."""

    def get(self, key: str, seconds: float) -> str:
        """As `TorchStore.get`; looks again and again."""
        return self._polled(key, time.monotonic() + seconds, seconds)


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
