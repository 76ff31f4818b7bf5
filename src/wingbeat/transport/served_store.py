"""The store of `wingbeat store`: a server with an optional journal, and its clients. No torch.

torch's ``TCPStore`` loses its content with its process, its clients cannot connect again, and each
of their calls after its end logs a C++ stack trace. Here a client whose server has ended fails at
once, logs one line, and connects again in the background. The server greets it with the random name
of its content. A server that restores its journal has the same name; under another name the client
fails for good, as others may have read what is lost.

Requests and answers are lines of JSON (`StoreServer`). Values are text, and writers with a job key
sign them (`torch_store`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from wingbeat.errors import RendezvousError, UsageError
from wingbeat.observe.log import log
from wingbeat.transport import descriptors
from wingbeat.transport.text import first_line

MAX_VALUE_BYTES = 16 << 20
"""Maximum bytes of a value. The largest values are lists of a model's tensors."""

MAX_KEY_CHARS = 4096

MAX_BYTES = 1 << 30
"""Maximum bytes of all keys and values of a server."""

REQUEST_S = 5.0
"""Seconds for the answer to a request."""

_RETRY_S = 0.5
"""Seconds between two attempts to connect."""

_FORMAT = "wingbeat store 1"
_LINE_BYTES = 6 * MAX_VALUE_BYTES + 4 * MAX_KEY_CHARS  # JSON may escape each character
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class StoreUnavailable(RuntimeError):
    """The store does not answer, or its content is lost."""


# -- content ------------------------------------------------------------------------------


class Content:
    """The keys and values of a server. Not thread-safe.

    ``name`` is random, and equal in a server that restores the journal of this one.
    """

    def __init__(self, name: str = "") -> None:
        self.name = name or secrets.token_hex(8)
        self.values: dict[str, str] = {}
        self.nbytes = 0

    def set(self, key: str, value: str) -> None:
        """Set a value."""
        self.delete(key)
        self.values[key] = value
        self.nbytes += len(key) + len(value)

    def delete(self, key: str) -> bool:
        """Delete a value; return whether there was one."""
        before = self.values.pop(key, None)
        self.nbytes -= 0 if before is None else len(key) + len(before)
        return before is not None


class Journal:
    """The changes of a server's content, in a file that the next server restores.

    A change is in the page cache before its answer is sent, so it survives the end of the process,
    but not of the host: after a reboot the content has another name.

    Raises:
        UsageError: the file cannot be used, is not a journal, or another process uses it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            self._file = os.fdopen(descriptor, "r+", encoding="utf-8", newline="\n")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"--journal {path}: another `wingbeat store` uses this file: name another one"
            ) from None
        except OSError as error:
            raise UsageError(f"--journal {path}: {error.strerror}: name another file") from None
        self.content = self._restore(self._file)

    def _restore(self, file: TextIO) -> Content:
        """Read the file; begin a new content if it is empty or from before a reboot."""
        file.seek(0)
        lines = file.read().split("\n")
        complete = lines[:-1]  # the process may have ended while it wrote the last one
        if not complete:
            return self._begin(Content())
        try:
            kind, name, boot = json.loads(complete[0])
            if kind != _FORMAT:
                raise ValueError
            content = Content(str(name))
            for line in complete[1:]:
                _apply(content, json.loads(line))
        except (ValueError, TypeError, RecursionError):
            raise UsageError(
                f"--journal {self._path}: this is not a journal of `wingbeat store`: name another "
                "file, or delete it"
            ) from None
        if boot != _boot():
            log.warning(
                "the journal %s is from before this host was started: its content may be "
                "incomplete, and is dropped", self._path,
            )  # fmt: skip
            return self._begin(Content())
        if lines[-1]:
            file.truncate(len("\n".join(complete).encode()) + 1)
        log.info("%d values were restored from %s", len(content.values), self._path)
        return content

    def _begin(self, content: Content) -> Content:
        assert self._file is not None
        self._file.truncate(0)
        self.write([_FORMAT, content.name, _boot()])
        return content

    def write(self, change: Sequence[str]) -> None:
        """Append a change. A file that cannot be written is deleted: it is not restored."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(change) + "\n")
            self._file.flush()
        except OSError as error:
            log.warning(
                "cannot write the journal %s: %s; the store continues without one, and is empty "
                "after a restart", self._path, error.strerror,
            )  # fmt: skip
            with contextlib.suppress(OSError):
                self._path.unlink()
            self.close()

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()


def _boot() -> str:
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""


def _apply(content: Content, change: Any) -> None:
    match change:
        case [str(key), str(value)]:
            content.set(key, value)
        case [str(key)]:
            content.delete(key)
        case _:
            raise ValueError(change)


# -- server -------------------------------------------------------------------------------


class StoreServer:
    """Serves a store on all addresses of this host, in a thread, until `close`.

    Each request is a line, and so is its answer; they are JSON:

    - ``["set", key, value]``: null.
    - ``["swap", key, expected, value]``: sets the value if the present one is ``expected``, or if
      there is none and ``expected`` is empty. The value afterwards; null if there is none.
    - ``["read", key]``: the value or null.
    - ``["delete", key]``: whether there was a value.

    A refused request has the answer ``{"error": text}``, and the connection ends. The first line
    that a client reads is the format and the content's name.

    Args:
        port: TCP port; 0: any free one.
        journal: the file of changes; None: the content ends with the process.

    Raises:
        UsageError: the port or the journal cannot be used.
    """

    def __init__(self, port: int, journal: Path | None = None) -> None:
        descriptors.raise_limit()
        self._journal = None if journal is None else Journal(journal)
        self._content = Content() if self._journal is None else self._journal.content
        listener = _listen(port)
        self.port = int(listener.getsockname()[1])
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(
            asyncio.start_server(self._serve, sock=listener, limit=_LINE_BYTES)
        )
        self._clients: set[asyncio.StreamWriter] = set()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="wingbeat-store", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the server and its connections."""
        self._loop.call_soon_threadsafe(self._end)
        self._thread.join()
        self._loop.close()
        if self._journal is not None:
            self._journal.close()

    def _end(self) -> None:
        self._server.close()
        for writer in list(self._clients):
            writer.transport.abort()
        # Once the handlers of the connections have ended.
        self._loop.call_later(0.05, self._loop.stop)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._clients.add(writer)
        _keep_alive(writer.get_extra_info("socket"))
        try:
            _send(writer, [_FORMAT, self._content.name])
            while line := await reader.readline():
                try:
                    _send(writer, self._answer(json.loads(line)))
                except (ValueError, RecursionError) as error:
                    _send(writer, {"error": first_line(error)})
                    break
                await writer.drain()
        except (OSError, ValueError, asyncio.CancelledError):  # it has ended, or a line is too long
            pass
        finally:
            self._clients.discard(writer)
            writer.close()

    def _answer(self, request: Any) -> Any:
        content = self._content
        match request:
            case ["read", str(key)]:
                return content.values.get(key)
            case ["set", str(key), str(value)]:
                self._set(key, value)
                return None
            case ["swap", str(key), str(expected), str(value)]:
                if content.values.get(key, "") == expected:
                    self._set(key, value)
                return content.values.get(key)
            case ["delete", str(key)]:
                if found := content.delete(key):
                    self._write([key])
                return found
        raise ValueError("not a request")

    def _set(self, key: str, value: str) -> None:
        if len(key) > MAX_KEY_CHARS or len(value) > MAX_VALUE_BYTES:
            raise ValueError(f"{len(key)} characters of a key, {len(value)} of a value")
        if self._content.nbytes + len(key) + len(value) > MAX_BYTES:
            raise ValueError(f"the store is full: {MAX_BYTES} bytes")
        self._content.set(key, value)
        self._write([key, value])

    def _write(self, change: Sequence[str]) -> None:
        if self._journal is not None:
            self._journal.write(change)


def _listen(port: int) -> socket.socket:
    """Listen on all addresses; a `UsageError` if the port cannot be used."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=both)
    except OSError as error:
        used = error.errno == errno.EADDRINUSE
        why = "another program uses this port" if used else error.strerror
        raise UsageError(
            f"--port {port}: {why}: pass another one, also in WINGBEAT_STORE"
        ) from None


def _send(writer: asyncio.StreamWriter, value: Any) -> None:
    writer.write(json.dumps(value).encode() + b"\n")


def _keep_alive(sock: socket.socket) -> None:
    """Let a connection to a host that does not respond end after about half a minute."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):  # Linux
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


# -- client -------------------------------------------------------------------------------


class _Connection:
    """A client's connection to a server, which it renews. Thread-safe."""

    def __init__(self, host: str, port: int, seconds: float) -> None:
        self._host, self._port = host, port
        self._lock = threading.Lock()
        self._name, self._lost, self._closed = "", "", False
        self._socket: socket.socket | None = None
        deadline = time.monotonic() + seconds
        while True:
            left = deadline - time.monotonic()
            try:
                self._socket = self._connect(max(0.1, min(left, REQUEST_S)))
                return
            except (OSError, ValueError) as error:
                if left <= _RETRY_S:
                    raise RendezvousError(first_line(error)) from None
            time.sleep(_RETRY_S / 5)

    def request(self, *fields: str) -> Any:
        """Return the answer; a `StoreUnavailable` at once if there is no connection."""
        line = json.dumps(fields).encode() + b"\n"
        with self._lock:
            if self._socket is None:
                raise StoreUnavailable(self._lost)
            try:
                self._socket.settimeout(REQUEST_S)
                self._socket.sendall(line)
                answer = json.loads(self._read_line(self._socket))
            except (OSError, ValueError) as error:
                self._lose(error)
                raise StoreUnavailable(self._lost) from None
        if isinstance(answer, dict):
            raise StoreUnavailable(f"the store refuses {fields[1]!r:.80}: {answer.get('error')}")
        return answer

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._closed = True
            if self._socket is not None:
                self._socket.close()
                self._socket, self._lost = None, "the connection to the store is closed"

    def _connect(self, seconds: float) -> socket.socket:
        """Connect and read the name of the content; an OSError or ValueError if it fails."""
        sock = socket.create_connection((self._host, self._port), seconds)
        try:
            _keep_alive(sock)
            self._rest = b""
            greeting = json.loads(self._read_line(sock))
            if not isinstance(greeting, list) or greeting[:1] != [_FORMAT] or len(greeting) != 2:
                raise ValueError("another program, or another version, answers there")
            name = str(greeting[1])
            if self._name and name != self._name:
                self._lost = (
                    f"`wingbeat store` at {self._host}:{self._port} was started again without its "
                    "content; start it with --journal"
                )
                raise StoreUnavailable(self._lost)
            self._name = name
            return sock
        except BaseException:
            sock.close()
            raise

    def _read_line(self, sock: socket.socket) -> bytes:
        while b"\n" not in self._rest:
            more = sock.recv(1 << 16)
            if not more:
                raise ConnectionResetError("it has ended")
            self._rest += more
            if len(self._rest) > _LINE_BYTES:
                raise ValueError("another program answers there")
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _lose(self, error: Exception) -> None:
        assert self._socket is not None
        self._socket.close()
        self._socket = None
        why = "no answer in time" if isinstance(error, TimeoutError) else first_line(error)
        self._lost = f"`wingbeat store` at {self._host}:{self._port} does not answer ({why})"
        log.warning(
            "%s: training continues, and no worker can rejoin until it is started again there",
            self._lost,
        )
        threading.Thread(target=self._renew, name="wingbeat-store", daemon=True).start()

    def _renew(self) -> None:
        while not self._closed:
            time.sleep(_RETRY_S)
            with contextlib.suppress(OSError, ValueError):
                try:
                    found = self._connect(REQUEST_S)
                except StoreUnavailable as error:
                    log.warning(
                        "%s; training continues, and no worker can rejoin", first_line(error)
                    )
                    return
                with self._lock:
                    self._socket = found
                log.warning("`wingbeat store` at %s:%d answers again", self._host, self._port)
                return


class RemoteStore:
    """A client of a `StoreServer`, with the methods of torch's stores that wingbeat uses.

    Requests fail with `StoreUnavailable` at once while the server does not answer. ``prefix`` is
    that of all keys.

    Raises:
        RendezvousError: it is not reached within ``seconds``.
    """

    def __init__(self, host: str, port: int, seconds: float) -> None:
        self._connection, self._prefix = _Connection(host, port, seconds), ""

    def under(self, prefix: str) -> RemoteStore:
        """Return the part of this store whose keys begin with ``prefix``."""
        part = RemoteStore.__new__(RemoteStore)
        part._connection, part._prefix = self._connection, f"{self._prefix}{prefix}/"
        return part

    def set(self, key: str, value: str) -> None:
        """Set a value."""
        self._connection.request("set", self._prefix + key, value)

    def compare_set(self, key: str, expected: str | bytes, value: str) -> bytes:
        """Set a value if ``expected`` is the present one; return the value afterwards.

        Without a present one the value is set if ``expected`` is empty, and is ``expected``
        otherwise.
        """
        before = expected.decode() if isinstance(expected, bytes) else expected
        found = self._connection.request("swap", self._prefix + key, before, value)
        return (before if found is None else str(found)).encode()

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys have values."""
        return all(self._connection.request("read", self._prefix + k) is not None for k in keys)

    def delete_key(self, key: str) -> bool:
        """Delete a value; return whether there was one."""
        return bool(self._connection.request("delete", self._prefix + key))

    def close(self) -> None:
        """Close the connection, which all parts of a store share."""
        self._connection.close()
