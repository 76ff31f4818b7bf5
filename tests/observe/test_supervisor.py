"""The supervisor answers whoever may look, and bears with whatever visitors do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.reports import report
from wingbeat.observe import supervisor, top
from wingbeat.observe.report import Report
from wingbeat.observe.supervisor import Places, Supervisor

Visit = Callable[["Running"], Awaitable[None]]


class Running:
    """A supervisor in this process's event loop."""

    def __init__(self, places: Places, name: str = "train-1") -> None:
        self.said: list[str] = []
        self.reports = asyncio.StreamReader(limit=2 * supervisor.LARGEST)
        self.parent = True
        self.made = Supervisor(name, places, self.said.append)
        self.path = Path(places.folder) / f"{name}.sock"
        self.task = asyncio.create_task(self.made.run(self.reports, lambda: self.parent))

    async def ready(self, lines: int = 0) -> None:
        while not self.task.done() and (not self.path.exists() or len(self.said) < lines):
            await asyncio.sleep(0.01)

    def hear(self, *reports: Report) -> None:
        for each in reports:
            self.hear_text(each.rank, each.to_text())

    def hear_text(self, rank: int, text: str) -> None:
        self.reports.feed_data(f"{rank} {text}\n".encode())

    async def ask(self) -> dict[str, Any]:
        reader, writer = await asyncio.open_unix_connection(self.path)
        text = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        answer: dict[str, Any] = json.loads(text)
        return answer

    async def known(self, count: int) -> dict[str, Any]:
        """The job, once so many workers have been heard."""
        while True:
            job = await self.ask()
            if sum(worker["report"] is not None for worker in job["workers"]) >= count:
                return job

    async def end(self) -> None:
        self.reports.feed_eof()
        await asyncio.wait_for(self.task, 10)

    @property
    def port(self) -> int:
        [line] = [line for line in self.said if "http://" in line]
        return int(line.split(":")[-1].split("/")[0])

    async def http(self, request: bytes) -> tuple[str, str, bytes]:
        """Status, head and body of an answer."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(request)
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        status, _, rest = head.decode().partition("\r\n")
        return status, rest, body


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    # A socket's path has about a hundred characters, and a test's folder may take most of them.
    place = Path(os.path.relpath(tmp_path / "run"))
    return place if len(str(place)) < len(str(tmp_path)) else tmp_path / "run"


def play(visit: Visit, places: Places, *, lines: int = 0) -> Running:
    async def run() -> Running:
        running = Running(places)
        await running.ready(lines)
        await visit(running)
        if not running.task.done():
            await running.end()
        return running

    return asyncio.run(run())


def test_whoever_connects_is_shown_the_job(folder: Path) -> None:
    async def visit(running: Running) -> None:
        assert (await running.ask())["workers"] == []
        running.hear(report(0, 1), report(1, 1))
        job = await running.known(2)
        assert job["name"] == "train-1"
        assert [worker["report"]["iteration"] for worker in job["workers"]] == [2, 2]

    running = play(visit, Places(str(folder)))
    assert running.said == []
    assert not running.path.exists()


def test_only_the_user_may_connect(folder: Path) -> None:
    async def visit(running: Running) -> None:
        assert stat.S_IMODE(running.path.stat().st_mode) == 0o600
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700

    play(visit, Places(str(folder)))


def test_it_ends_with_the_one_that_started_it(folder: Path) -> None:
    async def visit(running: Running) -> None:
        running.parent = False
        await asyncio.wait_for(running.task, 10)
        assert not running.path.exists()

    play(visit, Places(str(folder)))


def test_reports_that_are_malformed_change_nothing_and_their_ranks_are_told_once(
    folder: Path,
) -> None:
    async def visit(running: Running) -> None:
        for _ in range(3):
            running.hear_text(1, "garbage")
            running.hear_text(2, report(0, 9, size=3).to_text())  # in another's name
            running.hear_text(2, "{}")
        running.hear(report(0, 3, size=3))
        job = await running.known(1)
        assert [each["report"] is not None for each in job["workers"]] == [True, False, False]

    first, second = play(visit, Places(str(folder))).said
    assert first.startswith("`wingbeat top` does not show a report of rank 1: Report is not JSON: ")
    assert second == "`wingbeat top` does not show a report of rank 2: rank is 0; allowed: 2"


def test_strangers_that_send_garbage_or_nothing_or_go_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "REQUEST_S", 0.2)

    async def visit(running: Running) -> None:
        held = []
        for _ in range(5):
            gone = socket.socket(socket.AF_UNIX)
            gone.connect(str(running.path))
            gone.close()
            held.append(await asyncio.open_unix_connection(running.path))
            held[-1][1].write(os.urandom(100_000))
            held.append(await asyncio.open_connection("127.0.0.1", running.port))
            held.append(await asyncio.open_connection("127.0.0.1", running.port))
            held[-1][1].write(b"\x16\x03\x01" + os.urandom(50_000))
        assert (await running.ask())["name"] == "train-1"
        for reader, writer in held:  # each of them is sent away
            try:
                await asyncio.wait_for(reader.read(), 10)
            except OSError:
                pass
            writer.close()
        assert not running.made._connections
        assert (await running.http(b"GET /job HTTP/1.1\r\n\r\n"))[0] == "HTTP/1.1 200 OK"

    play(visit, Places(str(folder), port=0), lines=1)


def test_a_visitor_that_never_reads_is_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "REQUEST_S", 0.2)
    monkeypatch.setattr(Supervisor, "_page", lambda self: b"x" * (8 << 20))

    async def visit(running: Running) -> None:
        stuck = socket.socket(socket.AF_UNIX)
        stuck.connect(str(running.path))
        while not running.made._connections:
            await asyncio.sleep(0.01)
        for _ in range(500):
            if not running.made._connections:
                break
            await asyncio.sleep(0.01)
        assert not running.made._connections
        stuck.close()

    play(visit, Places(str(folder)))


def test_visitors_that_never_read_take_a_bounded_memory_and_others_are_answered(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "REQUEST_S", 600.0)
    monkeypatch.setattr(supervisor, "_UNREAD", 20 << 20)
    asked: list[int] = []

    def page(_: Supervisor) -> bytes:
        asked.append(1)
        return json.dumps({"name": "x" * (4 << 20)}).encode()

    monkeypatch.setattr(Supervisor, "_page", page)

    async def visit(running: Running) -> None:
        stuck = []
        for number in range(20):
            stuck.append(socket.socket(socket.AF_UNIX))
            stuck[-1].connect(str(running.path))
            while len(asked) <= number:
                await asyncio.sleep(0.01)
            unread = sum(each.get_write_buffer_size() for each in running.made._connections)
            assert unread <= 20 << 20
        assert len((await running.ask())["name"]) == 4 << 20
        for each in stuck:
            each.close()

    play(visit, Places(str(folder)))


@pytest.mark.parametrize("said", [b"", b"GET /met"])
def test_connections_that_ask_nothing_keep_no_scrape_waiting(
    folder: Path, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    """More of them than are kept, and none reaches its time limit meanwhile."""
    monkeypatch.setattr(supervisor, "REQUEST_S", 600.0)
    most = supervisor._CONNECTIONS

    async def visit(running: Running) -> None:
        idle = []
        for _ in range(most + 30):
            idle.append(await asyncio.open_connection("127.0.0.1", running.port))
            idle[-1][1].write(said)
        for _ in range(3):
            assert (await running.http(b"GET /metrics HTTP/1.1\r\n\r\n"))[0].endswith("200 OK")
        assert (await running.ask())["name"] == "train-1"
        assert len(running.made._connections) <= most
        for reader, _ in idle[:30]:  # those that were open longest
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), 10) == b""
        for _, writer in idle:
            writer.close()

    play(visit, Places(str(folder), port=0), lines=1)


def test_request_that_comes_byte_by_byte_has_the_same_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "REQUEST_S", 0.2)

    async def visit(running: Running) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        answer = asyncio.ensure_future(reader.read())
        for _ in range(1000):
            writer.write(b"x")
            await asyncio.sleep(0.01)
            if answer.done():
                break
        assert answer.done()
        with contextlib.suppress(ConnectionResetError):
            assert answer.result() == b""
        writer.close()

    play(visit, Places(str(folder), port=0), lines=1)


@pytest.mark.parametrize(("port", "loaded"), [(None, False), (0, True)])
def test_library_for_metrics_is_loaded_only_where_there_is_a_port(
    folder: Path, port: int | None, loaded: bool
) -> None:
    script = f"""
import asyncio, sys
from wingbeat.observe.report import Report
from wingbeat.observe.supervisor import Places, Supervisor

async def main():
    reports = asyncio.StreamReader()
    reports.feed_eof()
    await Supervisor("x-1", Places({str(folder)!r}, port={port}), print).run(reports, lambda: True)


asyncio.run(main())
print(*({{"torch", "numpy", "prometheus_client"}} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == ("prometheus_client" if loaded else "")


def test_port_without_its_library_names_the_extra_and_the_socket_still_answers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "wingbeat.observe.prometheus", raising=False)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)

    async def visit(running: Running) -> None:
        assert "pip install 'wingbeat[metrics]'; training continues" in running.said[0]
        assert (await running.ask())["name"] == "train-1"

    play(visit, Places(str(folder), port=0), lines=1)


@pytest.mark.parametrize(
    ("request_line", "status", "body"),
    [
        (b"GET /metrics HTTP/1.1", "200 OK", b"wingbeat_workers"),
        (b"GET /metrics?x=1 HTTP/1.0", "200 OK", b"wingbeat_workers"),
        (b"GET /job HTTP/1.1", "200 OK", b'"train-1"'),
        (b"HEAD /metrics HTTP/1.1", "200 OK", b""),
        (b"GET / HTTP/1.1", "404 Not Found", b"/metrics"),
        (b"GET /../../etc/passwd HTTP/1.1", "404 Not Found", b"/metrics"),
        (b"POST /metrics HTTP/1.1", "400 Bad Request", b"GET"),
        (b"nonsense", "400 Bad Request", b"GET"),
        (b"", "400 Bad Request", b"GET"),
    ],
)
def test_pages(folder: Path, request_line: bytes, status: str, body: bytes) -> None:
    async def visit(running: Running) -> None:
        head = request_line + b"\r\nHost: x\r\n\r\n"
        said, rest, text = await running.http(head)
        assert said == f"HTTP/1.1 {status}"
        assert body in text
        assert bool(body) == bool(text)
        assert "Content-Length: " in rest
        if b"/metrics" in request_line and status == "200 OK":
            assert "text/plain; version=0.0.4" in rest

    play(visit, Places(str(folder), port=0), lines=1)


def test_http_listens_on_the_loopback_alone_unless_told(folder: Path) -> None:
    async def visit(running: Running) -> None:
        assert running.said == [f"metrics at http://127.0.0.1:{running.port}/metrics"]

    play(visit, Places(str(folder), port=0), lines=1)


def test_a_port_that_is_taken_is_said_and_the_socket_works(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_BIND_S", 0.0)
    monkeypatch.setattr(supervisor, "_POLL_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        async def visit(running: Running) -> None:
            [line] = running.said
            assert f"127.0.0.1:{port}: Address already in use; training continues" in line
            assert (await running.ask())["name"] == "train-1"

        play(visit, Places(str(folder), port=port), lines=1)


def test_a_host_that_does_not_exist_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_BIND_S", 0.0)

    async def visit(running: Running) -> None:
        [line] = running.said
        assert line.startswith("cannot serve metrics at no.such.host.invalid:9400: ")
        assert "error -" not in line

    play(visit, Places(str(folder), "no.such.host.invalid", 9400), lines=1)


def test_a_port_that_the_job_before_has_is_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_POLL_S", 0.01)
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]

    async def visit(running: Running) -> None:
        taken.close()
        await running.ready(1)
        assert running.said == [f"metrics at http://127.0.0.1:{port}/metrics"]

    play(visit, Places(str(folder), port=port))


def test_a_folder_that_cannot_be_written_is_said_and_nothing_is_left_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    async def visit(running: Running) -> None:
        await asyncio.wait_for(running.task, 10)

    running = play(visit, Places(str(tmp_path / "file")))
    [line] = running.said
    assert line.startswith("`wingbeat top` will not find this job: ")
    assert str(tmp_path / "file") in line


def test_a_path_too_long_for_a_socket_is_said(tmp_path: Path) -> None:
    async def visit(running: Running) -> None:
        await asyncio.wait_for(running.task, 10)

    running = play(visit, Places(str(tmp_path / ("x" * 120))))
    assert "will not find this job" in running.said[0]


def test_http_alone_works_where_there_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    async def visit(running: Running) -> None:
        assert (await running.http(b"GET /job HTTP/1.1\r\n\r\n"))[0].endswith("200 OK")

    async def run() -> None:
        running = Running(Places(str(tmp_path / "file"), port=0))
        while len(running.said) < 2:
            await asyncio.sleep(0.01)
        await visit(running)
        await running.end()

    asyncio.run(run())


def test_a_job_that_is_started_again_takes_the_name_over(folder: Path) -> None:
    async def visit(old: Running) -> None:
        new = Running(Places(str(folder)))
        new.hear(report(0, 9, size=1))
        while not new.made._socket:
            await asyncio.sleep(0.01)
        await old.end()  # it must leave the new one's socket
        assert len((await new.known(1))["workers"]) == 1
        await new.end()
        assert list(folder.iterdir()) == []

    play(visit, Places(str(folder)))


def test_start_removes_the_sockets_of_killed_jobs(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    long_ago = time.time() - 120
    for name in ("dead-2.sock", "dead-3.4711", "new-4.4712"):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(folder / name))
    os.utime(folder / "dead-3.4711", (long_ago, long_ago))
    (folder / "file-5.sock").touch()

    async def visit(running: Running) -> None:
        assert sorted(path.name for path in folder.iterdir()) == [
            "file-5.sock", "new-4.4712", "train-1.sock",
        ]  # fmt: skip

    play(visit, Places(str(folder)))


def test_two_jobs_have_a_socket_each(folder: Path) -> None:
    async def visit(one: Running) -> None:
        two = Running(Places(str(folder)), "eval-2")
        await two.ready()
        names = await asyncio.to_thread(lambda: [f.name for f in top.running(folder)])
        assert names == ["eval-2", "train-1"]
        await two.end()

    play(visit, Places(str(folder)))
