"""Server processes: start, supervision and exit."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest

from helpers.mailboxes import receive
from helpers.waiting import PATIENCE, until
from wingbeat.methods.parameter_server.protocol import Kind
from wingbeat.methods.parameter_server.server import ServerConfig
from wingbeat.transport.loopback import Switchboard
from wingbeat.transport.messages import Mailbox, open_mailbox
from wingbeat.transport.services import ProcessService, ThreadService

CONFIG = ServerConfig(
    room="servers/", index=0, ranks=(0, 1), hosts=(1,), interfaces=("lo",), classes=2,
    encrypted=True, timeout=PATIENCE, max_sum_bytes=1 << 20, order="ready",
)  # fmt: skip


@pytest.fixture
def started() -> Iterator[Callable[..., ProcessService]]:
    made: list[ProcessService] = []

    def make(store: Switchboard, **fields: object) -> ProcessService:
        made.append(ProcessService(dataclasses.replace(CONFIG, **fields), store))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.kill()


def met(store: Switchboard) -> list[Mailbox]:
    """The workers' mailboxes, which have met the server."""

    def one(rank: int) -> Mailbox:
        return open_mailbox(
            store, rank, [2], namespace="servers/", interfaces=["lo"], seconds=PATIENCE,
            name=CONFIG.name,
        )  # fmt: skip

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(one, range(2)))


def test_server_exits_once_all_workers_leave(started: Callable[..., ProcessService]) -> None:
    server = started(Switchboard())
    boxes = met(server._store)  # type: ignore[arg-type]
    assert server.ended() is None
    for box in boxes:
        box.close()
    server.close(20.0)
    assert server.ended() == "server 0 (started by rank 1) has ended with exit status 0"
    assert not server._store_thread.is_alive()


def test_killed_server_is_reported(started: Callable[..., ProcessService]) -> None:
    server = started(Switchboard())
    boxes = met(server._store)  # type: ignore[arg-type]
    os.kill(server._process.pid, signal.SIGKILL)
    until(lambda: server.ended() is not None)
    assert server.ended() == "server 0 (started by rank 1) has ended by signal 9"
    server.close(20.0)
    for box in boxes:
        box.abandon()


def test_failed_startup_is_reported_in_one_line(
    started: Callable[..., ProcessService], capfd: pytest.CaptureFixture[str]
) -> None:
    server = started(Switchboard(), interfaces=("nosuch0",))
    until(lambda: server.ended() is not None)
    assert server.ended() == "server 0 (started by rank 1) has ended with exit status 1"
    server.close(20.0)
    told = capfd.readouterr().err.strip()
    assert "nosuch0" in told
    assert "\n" not in told


def test_server_ignores_sigint(started: Callable[..., ProcessService]) -> None:
    server = started(Switchboard())
    boxes = met(server._store)  # type: ignore[arg-type]
    os.kill(server._process.pid, signal.SIGINT)
    for box in boxes:
        box.close()
    server.close(20.0)
    assert str(server.ended()).endswith("exit status 0")


def test_server_after_sigterm_serves_until_workers_leave(
    started: Callable[..., ProcessService],
) -> None:
    """Schedulers send it to all processes of a job, and workers then save what servers hold."""
    server = started(Switchboard())
    boxes = met(server._store)  # type: ignore[arg-type]
    os.kill(server._process.pid, signal.SIGTERM)
    for box in boxes:
        box.post(2, Kind.PUSH_PULL, np.ones(4, "f4"), dtype="float32")
    for box in boxes:
        assert bytes(receive(box).payload) == np.full(4, 2.0, "f4").tobytes()
    for box in boxes:
        box.close()
    server.close(20.0)
    assert str(server.ended()).endswith("exit status 0")


def test_server_after_sigterm_exits_after_timeout(
    started: Callable[..., ProcessService], capfd: pytest.CaptureFixture[str]
) -> None:
    server = started(Switchboard(), timeout=2.0)
    boxes = met(server._store)  # type: ignore[arg-type]
    os.kill(server._process.pid, signal.SIGTERM)
    until(lambda: server.ended() is not None)
    assert server.ended() == "server 0 (started by rank 1) has ended with exit status 143"
    server.close(20.0)
    told = capfd.readouterr().err
    assert told == (
        "server 0 (started by rank 1) ends 2 s after SIGTERM: its workers have not left\n"
    )
    for box in boxes:
        box.abandon()


def test_server_without_store_exits(
    started: Callable[..., ProcessService], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Switchboard()

    def broken(key: str) -> bool:
        raise RuntimeError("the store is gone")

    monkeypatch.setattr(store, "has", broken)
    server = started(store)
    until(lambda: server.ended() is not None)
    assert str(server.ended()).endswith("exit status 1")


PARENT = """
import sys, time
from wingbeat.methods.parameter_server.server import ServerConfig
from wingbeat.transport.services import ProcessService
from wingbeat.transport.loopback import Switchboard
server = ProcessService(ServerConfig.from_json(sys.argv[1]), Switchboard())
print(server._process.pid, flush=True)
time.sleep(600)
"""


def test_server_exits_with_its_parent() -> None:
    """Though nobody else comes, for whom it waits much longer."""
    config = dataclasses.replace(CONFIG, timeout=600.0).to_json()
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, config], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert parent.stdout is not None
    server = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE)


def test_thread_server_reports_why_it_ended() -> None:
    server = ThreadService(dataclasses.replace(CONFIG, interfaces=("nosuch0",)), Switchboard())
    until(lambda: server.ended() is not None)
    assert str(server.ended()).startswith("server 0 (started by rank 1) has ended: ")
    server.close(20.0)


def test_thread_server_ends_on_kill() -> None:
    store = Switchboard()
    server = ThreadService(CONFIG, store)
    boxes = met(store)
    server.kill()
    server.close(20.0)
    assert server.ended() is None
    until(lambda: not any(t.name == "wingbeat-service" for t in threading.enumerate()))
    for box in boxes:
        box.abandon()
