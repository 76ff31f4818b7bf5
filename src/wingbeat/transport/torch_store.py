"""The rendezvous store on top of torch.distributed, with optional authentication of its values."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import hmac
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TypeAlias, TypeVar

import torch
import torch.distributed as dist

from wingbeat.errors import UsageError
from wingbeat.observe.log import log
from wingbeat.transport.served_store import MAX_VALUE_BYTES, RemoteStore, StoreUnavailable
from wingbeat.transport.store import Store
from wingbeat.transport.text import first_line

KEY_VARIABLE = "WINGBEAT_JOB_KEY"
"""Environment variable that holds the job's key, the same on all workers."""

KEY_FILE_VARIABLE = "WINGBEAT_JOB_KEY_FILE"
"""Environment variable that names a file with the job's key instead."""

TAG_PREFIX = "hmac-sha256:"
"""Prefix of every authenticated value."""

_MIN_KEY_CHARS, _MAX_KEY_CHARS = 16, 4096
_TAG_DIGITS = 64


class Authenticator:
    """Adds an HMAC-SHA256 tag over a context, the key and the value to each value.

    A value copied from another key, job or `init` is rejected. An earlier value of the same key has
    a valid tag and is accepted.
    """

    def __init__(self, key: bytes, context: str) -> None:
        self._key, self.context = key, context

    def within(self, prefix: str) -> Authenticator:
        """Return the authenticator of keys that have ``prefix``."""
        return Authenticator(self._key, f"{self.context}/{prefix}")

    def sign(self, name: str, value: str) -> str:
        """Return ``value`` with its tag, in the form stored under ``name``."""
        return f"{TAG_PREFIX}{self._tag(name, value)}:{value}"

    def verify(self, name: str, text: str) -> str | None:
        """Return the value stored under ``name``; None if its tag is invalid."""
        value = text[len(TAG_PREFIX) + _TAG_DIGITS + 1 :]
        # `sign` returns the prefix and the tag too, so this compares them as well.
        expected = self.sign(name, value)
        return value if hmac.compare_digest(expected.encode(), text.encode()) else None

    def _tag(self, name: str, value: str) -> str:
        signed = json.dumps([self.context, name, value])
        return hmac.new(self._key, signed.encode(), hashlib.sha256).hexdigest()


def job_key(env: Mapping[str, str]) -> bytes | None:
    """Return the job's key from an environment, or None.

    Raises a `UsageError` if it is too short, if its file cannot be read, or if there are two.
    """
    name, key, path = KEY_VARIABLE, env.get(KEY_VARIABLE), env.get(KEY_FILE_VARIABLE)
    if path is not None:
        if key is not None:
            raise UsageError(f"both {KEY_VARIABLE} and {KEY_FILE_VARIABLE} are set: unset one")
        name = f"{KEY_FILE_VARIABLE}={path}"
        try:
            with open(path, encoding="utf-8", errors="surrogateescape") as file:
                key = file.read(_MAX_KEY_CHARS).strip()
        except OSError as error:
            raise UsageError(
                f"{name}: {error.strerror}: name a file that this worker can read"
            ) from None
    if key is None:
        return None
    if len(key) < _MIN_KEY_CHARS:
        raise UsageError(
            f"{name} has {len(key)} characters: set at least {_MIN_KEY_CHARS}, the same on "
            "all workers, such as the output of `openssl rand -hex 32`"
        )
    return key.encode("utf-8", "surrogateescape")


_T = TypeVar("_T")

_WATCH_S = 5.0
"""Seconds for the connection of a `StoreWatch`."""

_MISSING = "?"
"""The value of a missing key."""

_MIN_POLL_S, _MAX_POLL_S = 0.001, 0.1
"""Minimum and maximum seconds between two reads of the store."""

_REPLACE_ATTEMPTS = 16
"""Attempts to replace a rejected value while another process keeps writing it."""


class StoreWatch:
    """Detects the end of the server of torch's store, by an idle connection to it.

    torch's own connections show it in a request only, which logs a C++ stack trace.

    Args:
        host: name or address of the server.
        port: its TCP port.
        text: the error of requests after it has ended, which is also logged once.
        advice: what is logged after it.
    """

    def __init__(self, host: str, port: int, text: str, advice: str) -> None:
        self.text, self._advice, self._quiet = text, advice, False
        self._socket = socket.create_connection((host, port), _WATCH_S)
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        threading.Thread(target=self._wait, name="wingbeat-store", daemon=True).start()

    @property
    def ended(self) -> bool:
        """Whether the server has ended. Does not wait."""
        try:
            return not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def quiet(self) -> None:
        """Log nothing any more: this worker leaves."""
        self._quiet = True

    def close(self) -> None:
        """Close the connection."""
        self._quiet = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _wait(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.recv(1, socket.MSG_PEEK)
        if not self._quiet:
            log.warning("%s; %s", self.text, self._advice)


class _WithoutTraces:
    """A context in which torch's C++ code logs errors only, no warnings. Thread-safe.

    A request that is under way when the server ends would log a stack trace. There is no function
    for the level, which `TORCH_CPP_LOG_LEVEL` sets at the start.
    """

    _ERROR = 2

    def __init__(self) -> None:
        self._lock, self._users, self._level = threading.Lock(), 0, None
        library = Path(torch.__file__).parent / "lib" / "libc10.so"
        with contextlib.suppress(OSError, ValueError):  # another build of torch
            self._level = ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_log_level")
        self._usual = 0 if self._level is None else self._level.value

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            if self._level is not None:
                self._level.value = max(self._usual, self._ERROR)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if self._level is not None and not self._users:
                self._level.value = self._usual


_without_traces = _WithoutTraces()


class WatchedStore:
    """torch's store, whose requests fail with `StoreUnavailable` at once after its server's end."""

    def __init__(self, store: dist.Store, watch: StoreWatch) -> None:
        self.inner, self._watch = store, watch

    def under(self, prefix: str) -> WatchedStore:
        """Return the part of this store whose keys begin with ``prefix``."""
        return WatchedStore(dist.PrefixStore(prefix, self.inner), self._watch)

    def set(self, key: str, value: str) -> None:
        """As of torch's stores."""
        self._call(lambda: self.inner.set(key, value))

    def compare_set(self, key: str, expected: str | bytes, value: str) -> bytes:
        """As of torch's stores."""
        return self._call(lambda: bytes(self.inner.compare_set(key, expected, value)))

    def check(self, keys: list[str]) -> bool:
        """As of torch's stores."""
        return self._call(lambda: bool(self.inner.check(keys)))

    def delete_key(self, key: str) -> bool:
        """As of torch's stores."""
        return self._call(lambda: bool(self.inner.delete_key(key)))

    def _call(self, call: Callable[[], _T]) -> _T:
        if self._watch.ended:
            raise StoreUnavailable(self._watch.text)
        try:
            with _without_traces:
                return call()
        except RuntimeError:
            if self._watch.ended:
                raise StoreUnavailable(self._watch.text) from None
            raise


RawStore: TypeAlias = "dist.Store | RemoteStore | WatchedStore"
"""Stores below a `TorchStore`."""


def part_of(store: RawStore, prefix: str) -> RawStore:
    """Return the part of a store whose keys begin with ``prefix``."""
    if isinstance(store, dist.Store):
        return dist.PrefixStore(prefix, store)
    return store.under(prefix)


def server_of(store: dist.Store) -> tuple[str, int] | None:
    """Return host and port of the server of torch's store; None if it is of another kind."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, dist.TCPStore) else None


class RejectedValue(TimeoutError):
    """A value in the store lacks a valid tag or is too large."""


class TorchStore:
    """`Store` on top of torch's store, whose values are bytes.

    With an authenticator, a value that was not written with the job's key counts as missing: it is
    not returned, `has` is False, and `claim` and `replace` overwrite it. ``path`` is the prefix of
    ``store`` in torch's.
    """

    def __init__(
        self, store: RawStore, authenticator: Authenticator | None = None, path: str = ""
    ) -> None:
        self._store, self.authenticator, self.path = store, authenticator, path
        self._warned: set[str] = set()

    def under(self, prefix: str) -> TorchStore:
        """Return the part of this store whose keys begin with ``prefix``."""
        auth = self.authenticator
        return TorchStore(
            part_of(self._store, prefix),
            auth and auth.within(prefix),
            f"{self.path}/{prefix}",
        )

    def set(self, key: str, value: str) -> None:
        """Publish ``value`` under ``key``."""
        self._store.set(key, self._signed(key, value))

    def get(self, key: str, seconds: float, *, rejected_s: float = math.inf) -> str:
        """Wait for ``key``; a `TimeoutError` after ``seconds``.

        An invalid value may be overwritten: a `RejectedValue` if it was not after ``rejected_s``.
        """
        # Polls: a blocking wait would lock torch's store for the other threads.
        deadline, pause = time.monotonic() + seconds, _MIN_POLL_S
        while True:
            now = time.monotonic()
            try:
                if (value := self.peek(key)) is not None:
                    return value
                if now >= deadline:
                    raise TimeoutError(f"{key}: not there after {seconds:g} s")
            except RuntimeError as err:
                if not isinstance(err, StoreUnavailable) or now >= deadline:
                    raise TimeoutError(f"{key}: {first_line(err)}") from None
            except RejectedValue:
                deadline = min(deadline, now + rejected_s)
                if self.authenticator is None or now >= deadline:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, _MAX_POLL_S)

    def has(self, key: str) -> bool:
        """Whether ``key`` is published. Does not wait; False if the store is unavailable."""
        try:
            if self.authenticator is None:
                return bool(self._store.check([key]))
            return self.peek(key) is not None
        except (RuntimeError, RejectedValue):
            return False

    def peek(self, key: str) -> str | None:
        """Return a value without waiting, or None; a `RejectedValue` if it is invalid."""
        found = read_key(self._store, key)
        return None if found is None else self._verified(key, found)

    def claim(self, key: str, value: str) -> str:
        """Publish ``value`` unless the key exists; return the published value."""
        return self.replace(key, "", value)

    def replace(self, key: str, before: str, value: str) -> str:
        """Publish ``value`` if ``before`` is published; return the value published afterwards."""
        new = self._signed(key, value)
        expected: str | bytes = self._signed(key, before) if before else ""
        for _ in range(_REPLACE_ATTEMPTS):
            try:
                found: bytes = self._store.compare_set(key, expected, new)
                return self._verified(key, found)
            except RejectedValue:
                if self.authenticator is None:
                    raise
                expected = found
            except RuntimeError as err:
                raise TimeoutError(f"{key}: {first_line(err)}") from None
        raise RejectedValue(f"{key}: another process keeps writing it without the job's key")

    def _signed(self, key: str, value: str) -> str:
        return value if self.authenticator is None else self.authenticator.sign(key, value)

    def _verified(self, key: str, found: bytes) -> str:
        if len(found) > MAX_VALUE_BYTES:
            why = f"{len(found)} bytes, more than {MAX_VALUE_BYTES}"
        else:
            try:
                text = found.decode()
                value = text if self.authenticator is None else self.authenticator.verify(key, text)
                if value is not None:
                    return value
                why = (
                    "its authentication tag is wrong or missing: it was not written with this "
                    "job's key"
                )
            except UnicodeDecodeError:
                why = "it is not text"
        if key not in self._warned:
            self._warned.add(key)
            log.warning("the value of %s in the store is rejected: %s", key, why)
        raise RejectedValue(f"{key}: {why}")


def tcp_store(host: str, port: int, seconds: float, *, serves: bool = False) -> dist.Store:
    """Return torch's store at an address, which this process connects to or ``serves``.

    A later `wingbeat.init` of a process that serves it uses the same server. Waits for no other
    process. A `RuntimeError` after ``seconds``, or if the port is in use.
    """
    return dist.TCPStore(
        host,
        port,
        is_master=serves,
        wait_for_workers=False,
        multi_tenant=serves,
        timeout=timedelta(seconds=seconds),
    )


OF_JOB = frozenset({"failed", "here", "incarnation", "left", "waited", "waiting"})
"""First parts of the keys under which ranks of the job publish how they are: `failures`."""


class ColumnStore:
    """`AtomicStore` of the ranks of a mesh's column: a part of the job's store.

    What is published of a rank of the job stays in the job's own, so that a failure is attributed
    across columns.
    """

    def __init__(self, job: TorchStore, prefix: str) -> None:
        self._job, self.own = job, job.under(prefix)

    def _of(self, key: str) -> TorchStore:
        return self._job if key.partition("/")[0] in OF_JOB else self.own

    def set(self, key: str, value: str) -> None:
        """As `TorchStore.set`."""
        self._of(key).set(key, value)

    def get(self, key: str, seconds: float) -> str:
        """As `TorchStore.get`."""
        return self._of(key).get(key, seconds)

    def has(self, key: str) -> bool:
        """As `TorchStore.has`."""
        return self._of(key).has(key)

    def claim(self, key: str, value: str) -> str:
        """As `TorchStore.claim`."""
        return self._of(key).claim(key, value)


def is_append_only(store: Store) -> bool:
    """Whether deleted or replaced values remain in the store, as in torch's ``FileStore``."""
    inner = store._store if isinstance(store, TorchStore) else None
    if isinstance(inner, WatchedStore):
        inner = inner.inner
    while isinstance(inner, dist.PrefixStore):
        inner = inner.underlying_store
    return isinstance(inner, dist.FileStore)


def read_key(store: RawStore, key: str) -> bytes | None:
    """Return a value without waiting, or None; a `RuntimeError` if the store is unavailable."""
    # One operation: another process may delete the key between a check and a read.
    value: bytes = store.compare_set(key, _MISSING, _MISSING)
    return None if value == _MISSING.encode() else value
