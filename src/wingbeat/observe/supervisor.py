"""The supervisor process: receives reports from rank 0 and serves a job's state.

It imports neither torch nor numpy. Clients can send only the name of a page. Training continues
without monitoring if it exits.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from wingbeat.observe.place import SUFFIX, NoPlace, made
from wingbeat.observe.report import LARGEST
from wingbeat.observe.watch import Watch

ASKING_S = 2.0
"""Seconds for a connection's request and answer together."""

_REQUEST = 8 << 10
"""Maximum bytes of a request."""

_AT_ONCE = 128
"""Maximum simultaneous connections; one more closes the oldest.

It exceeds the 100 that asyncio accepts at once, so idle connections cannot block a request that
arrives with its connection.
"""

_BIND_S = 5.0
"""Seconds to retry a port that a restarted job's predecessor may still hold."""

_LOOK_S = 0.5


@dataclass(frozen=True)
class Places:
    """The folder of the Unix socket, and the host and port of HTTP (None: no HTTP; 0: any port)."""

    folder: str
    host: str = "127.0.0.1"
    port: int | None = None


class Supervisor:
    """Serves a job's state over a Unix socket and HTTP; ``tell`` receives messages for the user."""

    def __init__(self, name: str, places: Places, tell: Callable[[str], None]) -> None:
        self._name, self._places, self._tell = name, places, tell
        self._watch = Watch(name, time.monotonic())
        self._visitors: dict[asyncio.WriteTransport, None] = {}  # ordered by arrival
        self._socket: Path | None = None
        self._inode = 0

    async def run(self, reports: asyncio.StreamReader, parent: Callable[[], bool]) -> None:
        """Serve until reports end or the parent process exits."""
        servers = [await self._open_socket(), await self._open_port()]
        try:
            if any(servers):
                await self._hear(reports, parent)
        finally:
            for server in servers:
                if server is not None:
                    server.close()
            self._remove_socket()

    async def _hear(self, reports: asyncio.StreamReader, parent: Callable[[], bool]) -> None:
        next_line = asyncio.ensure_future(reports.readline())
        while parent():
            done, _ = await asyncio.wait([next_line], timeout=_LOOK_S)
            if not done:
                continue
            try:
                line = next_line.result()
                if not line:
                    return
                self._watch.take(line.decode(errors="replace"), time.monotonic())
            except ValueError:  # exceeds the limit; the reader has dropped it
                self._watch.refused += 1
            next_line = asyncio.ensure_future(reports.readline())

    def _page(self) -> bytes:
        return json.dumps(self._watch.job(time.monotonic(), time.time()).to_json()).encode()

    # -- the Unix socket ---------------------------------------------------------------------

    async def _open_socket(self) -> asyncio.Server | None:
        try:
            path = made(Path(self._places.folder)) / f"{self._name}{SUFFIX}"
            # A socket of that name may remain from before a restart, so bind another name and
            # rename it.
            new = path.with_suffix(f".{os.getpid()}")
            with contextlib.suppress(OSError):
                new.unlink()
            server = await asyncio.start_unix_server(self._show, new)
            new.chmod(0o600)
            self._inode = new.stat().st_ino
            new.rename(path)
        except OSError as err:  # includes NoPlace
            why = str(err) if isinstance(err, NoPlace) else f"{self._places.folder}: {err}"
            self._tell(f"`wingbeat top` will not find this job: {why}")
            return None
        self._socket = path
        return server

    def _remove_socket(self) -> None:
        """Remove the socket, unless another job of that name has replaced it."""
        with contextlib.suppress(OSError):
            if self._socket is not None and self._socket.stat().st_ino == self._inode:
                self._socket.unlink()

    async def _show(self, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send the whole state to each client of the socket; there is no request."""
        async with self._visit(writer):
            writer.write(self._page())

    # -- HTTP ---------------------------------------------------------------------------------

    async def _open_port(self) -> asyncio.Server | None:
        host, port = self._places.host, self._places.port
        if port is None:
            return None
        importlib.import_module("wingbeat.observe.prometheus")  # fail now if the library is missing
        deadline = time.monotonic() + _BIND_S
        while True:
            try:
                server = await asyncio.start_server(self._http, host, port, limit=_REQUEST)
                break
            except OSError as err:
                if time.monotonic() > deadline:
                    why = err.strerror if isinstance(err, socket.gaierror) else _plain(err)
                    self._tell(f"metrics cannot be had at {host}:{port}: {why}; training goes on")
                    return None
                await asyncio.sleep(_LOOK_S)
        self._tell(f"metrics at http://{host}:{server.sockets[0].getsockname()[1]}/metrics")
        return server

    async def _http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with self._visit(writer):
            head = await reader.readuntil(b"\r\n\r\n")
            writer.write(self._response(head.split(b"\r\n", 1)[0].split()))

    def _response(self, words: list[bytes]) -> bytes:
        if (
            len(words) != 3
            or words[0] not in (b"GET", b"HEAD")
            or not words[2].startswith(b"HTTP/")
        ):
            return _http_text("400 Bad Request", "text/plain", b"GET /metrics or /job\n")
        page = words[1].split(b"?")[0]
        if page == b"/metrics":
            from wingbeat.observe import prometheus

            job = self._watch.job(time.monotonic(), time.time())
            text, kind = prometheus.exposition(job), prometheus.CONTENT_TYPE
        elif page == b"/job":
            text, kind = self._page(), "application/json"
        else:
            return _http_text("404 Not Found", "text/plain", b"there are /metrics and /job\n")
        return _http_text("200 OK", kind, text, only_head=words[0] == b"HEAD")

    @contextlib.asynccontextmanager
    async def _visit(self, writer: asyncio.StreamWriter) -> AsyncIterator[None]:
        """Limit a connection's time, and ignore disconnects and malformed requests."""
        mine = writer.transport
        if len(self._visitors) >= _AT_ONCE:
            longest = next(iter(self._visitors))
            del self._visitors[longest]
            longest.abort()
        self._visitors[mine] = None
        deadline = asyncio.get_running_loop().call_later(ASKING_S, mine.abort)
        try:
            yield
            await writer.drain()
            writer.close()
            await writer.wait_closed()
        except (OSError, EOFError, asyncio.LimitOverrunError):  # an abort raises EOFError
            pass
        finally:
            deadline.cancel()
            self._visitors.pop(mine, None)
            mine.abort()


def _plain(err: OSError) -> str:
    """Return the system's error text, which is shorter than asyncio's."""
    return os.strerror(err.errno) if err.errno else str(err)


def _http_text(status: str, kind: str, text: bytes, *, only_head: bool = False) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(text)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + (b"" if only_head else text)


async def serve(name: str, places: Places, parent: Callable[[], bool]) -> None:
    """Serve with one report per line of standard input; messages go to standard output."""
    loop = asyncio.get_running_loop()
    reports = asyncio.StreamReader(limit=2 * LARGEST)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reports), sys.stdin)

    def tell(text: str) -> None:
        with contextlib.suppress(OSError):
            print(text, flush=True)

    await Supervisor(name, places, tell).run(reports, parent)
