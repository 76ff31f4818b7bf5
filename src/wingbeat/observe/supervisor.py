"""The supervisor process: receives reports from rank 0 and serves a job's state.

It imports neither torch nor numpy. Clients can send only the name of a page. Training continues
without monitoring if it exits. ``python -m wingbeat.observe.supervisor NAME FOLDER [HOST PORT]``
starts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from wingbeat.observe.report import LARGEST, Watch

FOLDER = "WINGBEAT_RUNTIME_DIR"
"""Environment variable: another folder for the sockets."""

SUFFIX = ".sock"

REQUEST_S = 2.0
"""Seconds for a connection's request and answer together."""

_REQUEST = 8 << 10
"""Maximum bytes of a request."""

_CONNECTIONS = 128
"""Maximum simultaneous connections; one more closes the oldest.

It exceeds the 100 that asyncio accepts at once, so idle connections cannot block a request that
arrives with its connection.
"""

_UNREAD = 64 << 20
"""Maximum bytes that wait for clients to read them; then the oldest such connection is closed."""

_BIND_S = 5.0
"""Seconds to retry a port that a restarted job's predecessor may still hold."""

_POLL_S = 0.5

_RENAMED_S = 60.0
"""Seconds after which a socket that has not been renamed is one of a killed process."""


# -- the folder with one Unix socket per job of this user on this host ----------------------------


class NotPrivate(OSError):
    """The folder cannot be created, or other users have access to it."""


def socket_folder(env: Mapping[str, str] = os.environ) -> Path:
    """Return the folder, which may not exist.

    It is always in ``/tmp``: a job and ``wingbeat top`` may have different values of ``TMPDIR`` or
    ``XDG_RUNTIME_DIR``, and the latter's folder is removed at logout while jobs continue.
    """
    return Path(env.get(FOLDER) or f"/tmp/wingbeat-{os.getuid()}")


def make_private(path: Path) -> Path:
    """Create the folder for this user alone; raises NotPrivate if other users have access."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as err:
        raise NotPrivate(f"{path}: {err.strerror}") from None
    check_private(path)
    return path


def check_private(path: Path) -> None:
    """Raise NotPrivate if the folder exists and others have access, or it cannot be inspected."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    except OSError as err:
        raise NotPrivate(f"{path}: {err.strerror}") from None
    # Another user may have created that name in /tmp before.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise NotPrivate(
            f"{path}: it is not a folder of this user alone: chmod 700 it, or set {FOLDER}"
        )


def live_sockets(folder: Path) -> list[Path]:
    """Return the sockets of running jobs in a private folder; remove those of killed ones."""
    try:
        paths = sorted(folder.iterdir())
    except OSError:
        return []
    return [path for path in paths if _accepts(path) and path.suffix == SUFFIX]


def _accepts(path: Path) -> bool:
    """Whether a process accepts connections at this socket; removes the socket if none does."""
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
        probe.settimeout(REQUEST_S)
        found = path.lstat()
        # A socket with another suffix does not listen yet, unless it has been left for long.
        new = path.suffix != SUFFIX and time.time() - found.st_mtime < _RENAMED_S
        if stat.S_ISSOCK(found.st_mode) and not new:
            try:
                probe.connect(os.fspath(path))
            except ConnectionRefusedError:  # its process was killed
                path.unlink()
            else:
                return True
    return False


# -- the process ----------------------------------------------------------------------------------


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
        self._refused: set[str] = set()
        self._connections: dict[asyncio.WriteTransport, None] = {}  # ordered by arrival
        self._socket: Path | None = None
        self._inode = 0

    async def run(self, reports: asyncio.StreamReader, parent: Callable[[], bool]) -> None:
        """Serve until reports end or ``parent()`` is False, once the parent process has exited."""
        servers = [await self._open_socket(), await self._open_port()]
        try:
            if any(servers):
                await self._read_reports(reports, parent)
        finally:
            for server in servers:
                if server is not None:
                    server.close()
            # Another job of that name may have replaced the socket.
            with contextlib.suppress(OSError):
                if self._socket is not None and self._socket.stat().st_ino == self._inode:
                    self._socket.unlink()

    async def _read_reports(
        self, reports: asyncio.StreamReader, parent: Callable[[], bool]
    ) -> None:
        next_line = asyncio.ensure_future(reports.readline())
        while parent():
            done, _ = await asyncio.wait([next_line], timeout=_POLL_S)
            if not done:
                continue
            line = next_line.result()
            if not line:
                return
            rank, _, text = line.decode(errors="replace").partition(" ")
            why = self._watch.add_report(int(rank), text, time.monotonic())
            if why and rank not in self._refused:
                self._refused.add(rank)
                self._tell(f"`wingbeat top` does not show a report of rank {rank}: {why}")
            next_line = asyncio.ensure_future(reports.readline())

    async def _open_socket(self) -> asyncio.Server | None:
        try:
            folder = make_private(Path(self._places.folder))
            live_sockets(folder)  # removes those that killed jobs have left
            path = folder / f"{self._name}{SUFFIX}"
            # A socket of that name may remain from before a restart, so bind another name and
            # rename it.
            new = path.with_suffix(f".{os.getpid()}")
            with contextlib.suppress(OSError):
                new.unlink()
            server = await asyncio.start_unix_server(self._answer_socket, new)
            new.chmod(0o600)
            self._inode = new.stat().st_ino
            new.rename(path)
        except OSError as err:
            why = str(err) if isinstance(err, NotPrivate) else f"{self._places.folder}: {err}"
            self._tell(f"`wingbeat top` will not find this job: {why}")
            return None
        self._socket = path
        return server

    async def _open_port(self) -> asyncio.Server | None:
        host, port = self._places.host, self._places.port
        if port is None:
            return None
        try:
            importlib.import_module("wingbeat.observe.prometheus")
        except ModuleNotFoundError as error:
            if error.name != "prometheus_client":
                raise
            self._tell(
                f"cannot serve metrics at {host}:{port}: prometheus-client is not installed: pip "
                "install 'wingbeat[metrics]'; training continues"
            )
            return None
        deadline = time.monotonic() + _BIND_S
        while True:
            try:
                server = await asyncio.start_server(self._answer_http, host, port, limit=_REQUEST)
                break
            except OSError as err:
                if time.monotonic() > deadline:
                    # asyncio's text is longer than the system's.
                    system = err.errno and not isinstance(err, socket.gaierror)
                    why = os.strerror(err.errno or 0) if system else err.strerror or err
                    self._tell(f"cannot serve metrics at {host}:{port}: {why}; training continues")
                    return None
                await asyncio.sleep(_POLL_S)
        self._tell(f"metrics at http://{host}:{server.sockets[0].getsockname()[1]}/metrics")
        return server

    async def _answer_socket(
        self, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        async with self._connection(writer):  # there is no request
            self._send(writer, self._page())

    async def _answer_http(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        async with self._connection(writer):
            head = await reader.readuntil(b"\r\n\r\n")
            self._send(writer, self._response(head.split(b"\r\n", 1)[0].split()))

    def _send(self, writer: asyncio.StreamWriter, answer: bytes) -> None:
        """Send an answer; close the oldest connections whose clients read nothing."""
        unread = {each: each.get_write_buffer_size() for each in self._connections}
        excess = sum(unread.values()) + len(answer) - _UNREAD
        for each, nbytes in unread.items():
            if excess <= 0:
                break
            if nbytes:
                each.abort()
                excess -= nbytes
        writer.write(answer)

    def _page(self) -> bytes:
        return json.dumps(self._watch.job(time.monotonic(), time.time()).to_json()).encode()

    def _response(self, request: list[bytes]) -> bytes:
        method, path, version = request if len(request) == 3 else (b"", b"", b"")
        page, kind, status = path.split(b"?")[0], "text/plain", "200 OK"
        if method not in (b"GET", b"HEAD") or not version.startswith(b"HTTP/"):
            text, status = b"GET /metrics or /job\n", "400 Bad Request"
        elif page == b"/metrics":
            from wingbeat.observe import prometheus

            job = self._watch.job(time.monotonic(), time.time())
            text, kind = prometheus.exposition(job), prometheus.CONTENT_TYPE
        elif page == b"/job":
            text, kind = self._page(), "application/json"
        else:
            text, status = b"there are /metrics and /job\n", "404 Not Found"
        head = (
            f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(text)}\r\n"
            "Connection: close\r\n\r\n"
        )
        only_head = method == b"HEAD" and status == "200 OK"
        return head.encode() + (b"" if only_head else text)

    @contextlib.asynccontextmanager
    async def _connection(self, writer: asyncio.StreamWriter) -> AsyncIterator[None]:
        """Limit a connection's time, and ignore disconnects and malformed requests."""
        mine = writer.transport
        if len(self._connections) >= _CONNECTIONS:
            oldest = next(iter(self._connections))
            del self._connections[oldest]
            oldest.abort()
        self._connections[mine] = None
        deadline = asyncio.get_running_loop().call_later(REQUEST_S, mine.abort)
        try:
            yield
            await writer.drain()
            writer.close()
            await writer.wait_closed()
        except (OSError, EOFError, asyncio.LimitOverrunError):  # an abort raises EOFError
            pass
        finally:
            deadline.cancel()
            self._connections.pop(mine, None)
            mine.abort()


async def serve(name: str, places: Places, parent: Callable[[], bool]) -> None:
    """Serve; messages go to standard output.

    A line of standard input is a rank, a space, and what the rank has sent.
    """
    loop = asyncio.get_running_loop()
    reports = asyncio.StreamReader(limit=2 * LARGEST)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reports), sys.stdin)

    def tell(text: str) -> None:
        with contextlib.suppress(OSError):
            print(text, flush=True)

    await Supervisor(name, places, tell).run(reports, parent)


def main(arguments: list[str]) -> None:
    """Serve until the parent process exits."""
    # A terminal's interrupt and a scheduler's SIGTERM reach all processes of a job. The supervisor
    # exits after its parent.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    name, folder, *http = arguments
    places = Places(folder, http[0], int(http[1])) if http else Places(folder)
    parent = os.getppid()
    asyncio.run(serve(name, places, lambda: os.getppid() == parent))


if __name__ == "__main__":
    main(sys.argv[1:])
