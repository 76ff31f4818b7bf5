"""The store of `wingbeat store`: a server with an optional journal, and its clients. No torch.

torch's ``TCPStore`` loses its content with its process, its clients cannot connect again, and each
of their calls after its end logs a C++ stack trace. Here a client whose server has ended fails at
once, logs one line, and connects again in the background. The server greets it with the random name
of its content. A server that restores its journal has the same name; under another name the client
fails for good, as others may have read what is lost.

Requests and answers are lines of JSON (`StoreServer`). Values are text, and writers with a job key
sign them (`torch_store`). With a job key both ends of a connection prove that they have it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hmac
import json
import os
import secrets
import socket
import stat
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from wingbeat.errors import RendezvousError, UsageError
from wingbeat.files import replacing
from wingbeat.observe.log import log
from wingbeat.schema import excerpt, printable
from wingbeat.transport import descriptors, handshake
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

_LINE_S = 30.0
"""Seconds for a client to send a whole request, and to read a whole answer."""

_PROOF_S = 10.0
"""Seconds for a client to prove that it has the job's key."""

_MAX_STRANGERS = 64
"""Connections that have not proved it; one more closes another one."""

_MAX_WARNINGS = 64
"""Addresses whose refused connections and requests are logged."""

_MAX_PENDING = 256 << 20
"""Maximum bytes of the incomplete requests of all clients, and of the answers to all of them."""

_COMPACT_BYTES = 64 << 20
"""Bytes of a journal beside its content from which it is written again."""

_FORMAT = "wingbeat store 2"
_JOURNAL = "wingbeat store 1"
_LINE_BYTES = 6 * MAX_VALUE_BYTES + 4 * MAX_KEY_CHARS  # JSON may escape each character
_SHORT_BYTES = 1024
"""Maximum bytes of a line of the greeting."""

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
        self.nbytes += _nbytes(key, value)

    def delete(self, key: str) -> bool:
        """Delete a value; return whether there was one."""
        before = self.values.pop(key, None)
        self.nbytes -= 0 if before is None else _nbytes(key, before)
        return before is not None


def _nbytes(key: str, value: str) -> int:
    """Return the memory of an entry: a character takes up to four bytes."""
    return sys.getsizeof(key) + sys.getsizeof(value)


class Journal:
    """The changes of a server's content, in a file that the next server restores.

    A change is in the page cache before its answer is sent, so it survives the end of the process,
    but not of the host: after a reboot the content has another name.

    Raises:
        UsageError: the file cannot be used, is not a journal, or another process uses it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._size, self._compact_at = 0, _COMPACT_BYTES
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o600)
            if not _is_private(descriptor):
                os.close(descriptor)
                raise UsageError(
                    f"--journal {path}: this is not a file of this user alone: chmod 600 it, or "
                    "name another file"
                )
            self._file = os.fdopen(descriptor, "r+b")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"--journal {path}: another `wingbeat store` uses this file: name another one"
            ) from None
        except OSError as error:
            raise UsageError(f"--journal {path}: {error.strerror}: name another file") from None
        self.content = self._restore(self._file)

    def _restore(self, file: BinaryIO) -> Content:
        """Read the file; begin a new content if it is empty or from before a reboot."""
        try:
            complete = _complete_lines(file)
            first = next(complete, None)
            if first is None:
                file.seek(0)
                if not _begins_alike(file.read(_SHORT_BYTES), json.dumps([_JOURNAL, ""])[:-2]):
                    raise ValueError
                return self._begin(Content())
            kind, name, boot = json.loads(first)
            if kind != _JOURNAL:
                raise ValueError
            content, self._size = Content(str(name)), len(first)
            for line in complete:
                _apply(content, json.loads(line))
                self._size += len(line)
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
        self._compact_at += self._size
        file.truncate(self._size)  # the process may have ended while it wrote the last line
        log.info("%d values were restored from %s", len(content.values), self._path)
        return content

    def _begin(self, content: Content) -> Content:
        assert self._file is not None
        self._file.truncate(0)
        self._size, self.content = 0, content
        self.write([_JOURNAL, content.name, _boot()])
        return content

    def write(self, change: Sequence[str]) -> None:
        """Append a change. A file that cannot be written is deleted: it is not restored."""
        if self._file is None:
            return
        line = _line(change)
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            log.warning(
                "cannot write the journal %s: %s; the store continues without one, and is empty "
                "after a restart", self._path, error.strerror,
            )  # fmt: skip
            with contextlib.suppress(OSError):
                self._path.unlink()
            self.close()
            return
        self._size += len(line)
        if self._size > self._compact_at:
            self._compact()
            self._compact_at = 2 * self._size + _COMPACT_BYTES

    def _compact(self) -> None:
        """Replace the file by one with the present content alone."""
        kept, size = -1, 0
        try:
            with replacing(self._path) as draft:
                os.fchmod(draft.fileno(), 0o600)
                fcntl.flock(draft, fcntl.LOCK_EX | fcntl.LOCK_NB)
                kept = os.dup(draft.fileno())
                content = self.content
                for line in ([_JOURNAL, content.name, _boot()], *content.values.items()):
                    size += draft.write(_line(line))
        except UsageError as error:
            log.warning("%s; it grows further", error)
            if kept >= 0:
                os.close(kept)
            return
        self.close()
        self._file, self._size = os.fdopen(kept, "ab"), size

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()


def _line(change: Sequence[str]) -> bytes:
    return json.dumps(change).encode() + b"\n"


def _is_private(descriptor: int) -> bool:
    """Whether this is a file of this user alone: another one may have created its name first."""
    found = os.fstat(descriptor)
    own = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
    return own and not found.st_mode & 0o007


def _complete_lines(file: BinaryIO) -> Iterator[bytes]:
    file.seek(0)
    while (line := file.readline(_LINE_BYTES)).endswith(b"\n"):
        yield line


def _begins_alike(data: bytes, text: str) -> bool:
    """Whether the shorter one is the beginning of the other."""
    return data[: len(text)] == text.encode()[: len(data)]


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
    that a client reads is the format, the content's name and a nonce, which is empty without a key.
    With one, the client's first line is ``["prove", nonce, tag]`` and its answer a tag (`_tag`).

    Args:
        port: TCP port; 0: any free one.
        journal: the file of changes; None: the content ends with the process.
        key: the job's key, which all clients need; None without one.

    Raises:
        UsageError: the port or the journal cannot be used.
    """

    def __init__(self, port: int, journal: Path | None = None, key: bytes | None = None) -> None:
        descriptors.raise_limit()
        self._key = key
        self._journal = None if journal is None else Journal(journal)
        self._content = Content() if self._journal is None else self._journal.content
        self._clients: dict[_Client, None] = {}  # ordered by arrival
        self._pending = 0  # bytes of incomplete requests
        self._unread = 0  # bytes of answers that clients have not read
        self._warned: set[str] = set()
        listener = _listen(port)
        self.port = int(listener.getsockname()[1])
        self._loop = asyncio.new_event_loop()
        self._server, self._room = self._loop.run_until_complete(self._start(listener))
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="wingbeat-store", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the server and its connections."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        if self._journal is not None:
            self._journal.close()

    async def _start(self, listener: socket.socket) -> tuple[asyncio.Server, asyncio.Condition]:
        return await asyncio.start_server(self._serve, sock=listener), asyncio.Condition()

    async def _end(self) -> None:
        self._server.close()
        serving = asyncio.all_tasks() - {asyncio.current_task()}
        for client in self._clients:
            client.abort()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = _Client(reader, writer)
        self._clients[client] = None
        try:
            _keep_alive(writer.get_extra_info("socket"))
            if await self._greet(client):
                while (line := await self._read_line(client, _LINE_BYTES)) is not None:
                    await self._send(client, self._answer(json.loads(line)))
        except (OSError, asyncio.CancelledError):  # it has ended
            pass
        except (ValueError, RecursionError) as error:
            await self._refuse(client, "a request", printable(first_line(error)[:_SHORT_BYTES]))
        finally:
            writer.close()
            self._pending -= len(client.data)
            del self._clients[client]

    async def _greet(self, client: _Client) -> bool:
        """Send the name of the content; return whether the client has the key."""
        if self._key is None:
            client.proved = True
            await self._send(client, [_FORMAT, self._content.name, ""])
            return True
        self._drop_stranger()
        words = self._content.name, secrets.token_hex(32)
        with client.deadline(_PROOF_S):
            await self._send(client, [_FORMAT, *words])
            line = await self._read_line(client, _SHORT_BYTES)
        if line is None:
            return False
        match json.loads(line):
            case ["prove", str(own), str(tag)]:
                expected = _tag(self._key, "connect", *words, own)
                client.proved = hmac.compare_digest(tag.encode("utf-8", "replace"), expected)
                if client.proved:
                    await self._send(client, _tag(self._key, "accept", *words, own).decode())
        if not client.proved:
            await self._refuse(client, "a connection", "it does not have this job's key")
        return client.proved

    def _drop_stranger(self) -> None:
        """Keep few connections without a proof: close the oldest of the most frequent address."""
        strangers = [each for each in self._clients if not (each.proved or each.ended)]
        if len(strangers) > _MAX_STRANGERS:
            counts = Counter(each.address for each in strangers)
            max(strangers, key=lambda each: counts[each.address]).abort()

    async def _refuse(self, client: _Client, what: str, why: str) -> None:
        """Send and log why a client is refused."""
        if client.address not in self._warned and len(self._warned) < _MAX_WARNINGS:
            self._warned.add(client.address)
            log.warning("%s of %s is refused: %s", what, client.address, why)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await self._send(client, {"error": why})

    async def _read_line(self, client: _Client, most: int) -> bytes | None:
        """Return the next line of a client; None if it has closed the connection.

        A ValueError if the line exceeds ``most`` bytes. An incomplete line has a deadline, and all
        together have a limit: if they exceed it, the longest one's connection is closed.
        """
        with contextlib.ExitStack() as stack:
            limited = False
            while (end := client.data.find(b"\n", client.scanned)) < 0:
                client.scanned = len(client.data)
                if client.scanned > most:
                    raise ValueError(f"more than {most} bytes without a line feed")
                if client.data and not limited:
                    limited = True
                    stack.enter_context(client.deadline(_LINE_S))
                more = await client.reader.read(1 << 16)
                if not more:
                    return None
                client.data += more
                self._pending += len(more)
                if self._pending > _MAX_PENDING:
                    self._drop(max(self._clients, key=lambda each: len(each.data)))
        line = bytes(client.data[:end])
        del client.data[: end + 1]
        client.scanned, self._pending = 0, self._pending - end - 1
        return line

    def _drop(self, client: _Client) -> None:
        """Close a connection, and free the memory of its incomplete request."""
        client.abort()
        self._pending -= len(client.data)
        client.data.clear()

    async def _send(self, client: _Client, answer: Any) -> None:
        """Send an answer, after others if too much waits for clients to read it."""
        nbytes = len(answer) if isinstance(answer, str) else _SHORT_BYTES
        async with self._room:
            await self._room.wait_for(
                lambda: not self._unread or self._unread + nbytes <= _MAX_PENDING
            )
            self._unread += nbytes
        try:
            if client.ended:
                raise ConnectionResetError
            with client.deadline(_LINE_S):
                client.writer.write(json.dumps(answer).encode() + b"\n")
                await client.writer.drain()
        finally:
            self._unread -= nbytes
            async with self._room:
                self._room.notify_all()

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
        raise ValueError(f"not a request: {excerpt(request)}")

    def _set(self, key: str, value: str) -> None:
        if len(key) > MAX_KEY_CHARS or len(value) > MAX_VALUE_BYTES:
            raise ValueError(f"{len(key)} characters of a key, {len(value)} of a value")
        if self._content.nbytes + _nbytes(key, value) > MAX_BYTES:
            raise ValueError(f"the store is full: {MAX_BYTES} bytes")
        self._content.set(key, value)
        self._write([key, value])

    def _write(self, change: Sequence[str]) -> None:
        if self._journal is not None:
            self._journal.write(change)


class _Client:
    """A connection of a server: what has arrived of the next line, and its deadline."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.address = str((writer.get_extra_info("peername") or ["an unknown address"])[0])
        self.data, self.scanned = bytearray(), 0
        self.proved = False
        writer.transport.set_write_buffer_limits(0)  # `drain` waits until everything is read

    @property
    def ended(self) -> bool:
        """Whether the connection has ended, or is about to."""
        return self.writer.transport.is_closing()

    @contextlib.contextmanager
    def deadline(self, seconds: float) -> Iterator[None]:
        """End the connection after so many seconds, unless this ends before."""
        timer = asyncio.get_running_loop().call_later(seconds, self.abort)
        try:
            yield
        finally:
            timer.cancel()

    def abort(self) -> None:
        """End the connection."""
        self.writer.transport.abort()


def _tag(key: bytes, role: str, *words: str) -> bytes:
    """Return the proof of an end in ``role``: words are the content's name and both nonces."""
    signed = json.dumps([role, *words]).encode()
    return handshake.sign(key, b"wingbeat store/", signed).hex().encode()


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


def _keep_alive(sock: socket.socket) -> None:
    """Let a connection to a host that does not respond end after about half a minute."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):  # Linux
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


# -- client -------------------------------------------------------------------------------


class _OtherKeyError(StoreUnavailable):
    """The ends of a connection have different job keys, or one has none."""


class _Connection:
    """A client's connection to a server, which it renews. Thread-safe."""

    def __init__(self, host: str, port: int, seconds: float, key: bytes | None) -> None:
        self._host, self._port, self._key = host, port, key
        self._lock = threading.Lock()
        self._name, self._lost, self._closed = "", "", False
        self._socket: socket.socket | None = None
        deadline = time.monotonic() + seconds
        while True:
            left = deadline - time.monotonic()
            try:
                self._socket = self._connect(max(0.1, min(left, REQUEST_S)))
                return
            except _OtherKeyError as error:
                raise UsageError(str(error)) from None
            except (OSError, ValueError, RecursionError) as error:
                if left <= _RETRY_S:
                    raise RendezvousError(first_line(error)) from None
            time.sleep(_RETRY_S / 5)

    def request(self, *fields: str) -> Any:
        """Return the answer; a `StoreUnavailable` at once if there is no connection."""
        line = json.dumps(fields).encode() + b"\n"
        with self._lock:
            if self._socket is None:
                raise StoreUnavailable(self._lost)
            deadline = time.monotonic() + REQUEST_S
            try:
                self._socket.settimeout(REQUEST_S)
                self._socket.sendall(line)
                answer = json.loads(self._read_line(self._socket, _LINE_BYTES, deadline))
            except (OSError, ValueError, RecursionError) as error:
                self._lose(error)
                raise StoreUnavailable(self._lost) from None
        if isinstance(answer, dict):
            why = printable(str(answer.get("error"))[:_SHORT_BYTES])
            raise StoreUnavailable(f"the store refuses {fields[1]!r:.80}: {why}")
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
        deadline = time.monotonic() + seconds
        sock = socket.create_connection((self._host, self._port), seconds)
        try:
            _keep_alive(sock)
            self._rest = bytearray()
            greeting = json.loads(self._read_line(sock, _SHORT_BYTES, deadline))
            match greeting:
                case [kind, str(name), str(nonce)] if kind == _FORMAT:
                    self._prove(sock, name, nonce, deadline)
                case _:
                    raise ValueError("another program, or another version, answers there")
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

    def _prove(self, sock: socket.socket, name: str, nonce: str, deadline: float) -> None:
        """Prove to the server that this client has the key, and have it do the same."""
        if self._key is not None and nonce:
            own = secrets.token_hex(32)
            tag = _tag(self._key, "connect", name, nonce, own).decode()
            sock.sendall(json.dumps(["prove", own, tag]).encode() + b"\n")
            answer = json.loads(self._read_line(sock, _SHORT_BYTES, deadline))
            expected = _tag(self._key, "accept", name, nonce, own)
            if hmac.compare_digest(str(answer).encode("utf-8", "replace"), expected):
                return
        elif self._key is None and not nonce:
            return
        raise _OtherKeyError(
            f"`wingbeat store` at {self._host}:{self._port} has another job key, or one of both "
            "has none: set the same WINGBEAT_JOB_KEY for it and for all workers, or for none"
        )

    def _read_line(self, sock: socket.socket, most: int, deadline: float) -> bytes:
        scanned = 0
        while (end := self._rest.find(b"\n", scanned)) < 0:
            scanned = len(self._rest)
            if scanned > most:
                raise ValueError("another program answers there")
            more = handshake.receive(sock, 1 << 16, deadline)
            if not more:
                raise ConnectionResetError("it has ended")
            self._rest += more
        line = bytes(self._rest[:end])
        del self._rest[: end + 1]
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
            try:
                found = self._connect(REQUEST_S)
            except (OSError, ValueError, RecursionError, _OtherKeyError):
                continue  # another program may have its port until it is started again
            except StoreUnavailable as error:
                log.warning("%s; training continues, and no worker can rejoin", first_line(error))
                return
            with self._lock:
                self._socket = found
            log.warning("`wingbeat store` at %s:%d answers again", self._host, self._port)
            return


class RemoteStore:
    """A client of a `StoreServer`, with the methods of torch's stores that wingbeat uses.

    Requests fail with `StoreUnavailable` at once while the server does not answer. ``key`` is the
    job's key, and None without one.

    Raises:
        RendezvousError: it is not reached within ``seconds``.
        UsageError: it has another key.
    """

    def __init__(self, host: str, port: int, seconds: float, key: bytes | None = None) -> None:
        self._connection, self._prefix = _Connection(host, port, seconds, key), ""

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
        # Another client may have written a text that is not Unicode, which readers reject.
        before = (
            expected.decode("utf-8", "surrogatepass") if isinstance(expected, bytes) else expected
        )
        found = self._connection.request("swap", self._prefix + key, before, value)
        return (before if found is None else str(found)).encode("utf-8", "surrogatepass")

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys have values."""
        return all(self._connection.request("read", self._prefix + k) is not None for k in keys)

    def delete_key(self, key: str) -> bool:
        """Delete a value; return whether there was one."""
        return bool(self._connection.request("delete", self._prefix + key))

    def close(self) -> None:
        """Close the connection, which all parts of a store share."""
        self._connection.close()
