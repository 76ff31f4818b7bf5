"""The supervisor's process: what the environment chooses, and how it ends."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.reports import report
from wingbeat.errors import UsageError
from wingbeat.observe import top
from wingbeat.observe.report import Job
from wingbeat.observe.reporter import SupervisorProcess, enabled, places
from wingbeat.observe.supervisor import Places


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[[], SupervisorProcess]]:
    made: list[SupervisorProcess] = []

    def begin() -> SupervisorProcess:
        made.append(SupervisorProcess("train-1", Places(str(folder)), lambda _: None))
        return made[-1]

    yield begin
    for each in made:
        each.kill()


def _job(folder: Path, workers: int = 0) -> Job:
    """The job, once somebody answers for it and has heard of so many workers."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for found in top.running(folder):
            try:
                job = found.query()
            except top.JobLost:
                continue
            if len(job.workers) >= workers:
                return job
        time.sleep(0.01)
    raise AssertionError("nobody answers")


def test_it_is_on_unless_switched_off() -> None:
    assert enabled({})
    assert enabled({"WINGBEAT_TOP": "ON"})
    assert not enabled({"WINGBEAT_TOP": "off"})
    with pytest.raises(UsageError, match="WINGBEAT_TOP=maybe: allowed are on and off"):
        enabled({"WINGBEAT_TOP": "maybe"})


@pytest.mark.parametrize(
    ("said", "host", "port"),
    [
        ("9400", "127.0.0.1", 9400),
        (":9400", "127.0.0.1", 9400),
        ("0.0.0.0:1", "0.0.0.0", 1),
        ("[::1]:9400", "::1", 9400),
        ("0", "127.0.0.1", 0),
    ],
)
def test_where_metrics_are(said: str, host: str, port: int) -> None:
    env = {"WINGBEAT_METRICS": said, "WINGBEAT_RUNTIME_DIR": "/run/x"}
    assert places(env) == Places("/run/x", host, port)


def test_without_a_port_there_is_no_http() -> None:
    assert places({"WINGBEAT_RUNTIME_DIR": "/run/x"}).port is None
    assert places({"WINGBEAT_RUNTIME_DIR": "/run/x", "WINGBEAT_METRICS": ""}).port is None


@pytest.mark.parametrize("said", ["abc", "65536", "-1", "host:", "9400x", "٣"])
def test_a_port_that_is_none_is_one_clear_error(said: str) -> None:
    with pytest.raises(UsageError, match=r"WINGBEAT_METRICS=.*allowed is a port up to 65535"):
        places({"WINGBEAT_METRICS": said})


def test_what_it_is_told_it_tells(folder: Path, start: Callable[[], SupervisorProcess]) -> None:
    launched = start()
    assert launched.send_report(0, report(0, 4, size=1).to_text())
    [worker] = _job(folder, 1).workers
    assert worker.report == report(0, 4, size=1)
    launched.close()
    assert list(folder.iterdir()) == []


def test_text_of_a_rank_cannot_pass_for_another_ranks_report(folder: Path) -> None:
    """As other lines, or as the rest of a line that exceeds the limit of the reader in bytes."""
    forged, told = report(1, 9).to_text(), list[str]()
    launched = SupervisorProcess("train-1", Places(str(folder)), told.append)
    launched.send_report(0, report(0, 3).to_text())
    for text in (f"\n1 {forged}\n", "\u20ac" * 12_000 + f"1 {forged}", "\ud800", "x" * (20 << 20)):
        assert launched.send_report(0, text)
    launched.send_report(0, report(0, 4).to_text())
    deadline = time.monotonic() + 30
    while (job := _job(folder, 2)).workers[0].report != report(0, 4):
        assert time.monotonic() < deadline
    assert job.workers[1].report is None
    launched.close()
    [line] = told
    assert line.startswith("`wingbeat top` does not show a report of rank 0: ")


def test_it_ends_though_a_forked_child_has_its_socket_too(
    folder: Path, start: Callable[[], SupervisorProcess]
) -> None:
    launched = start()
    _job(folder)
    child = os.fork()
    if not child:  # as a DataLoader's worker that stays
        signal.pause()
        os._exit(0)
    try:
        launched.close()
        assert list(folder.iterdir()) == []
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_it_imports_neither_torch_nor_numpy(
    folder: Path, start: Callable[[], SupervisorProcess]
) -> None:
    launched = start()
    _job(folder)
    maps = Path(f"/proc/{launched.pid}/maps").read_text()
    assert "libpython" in maps or "python" in maps
    assert "torch" not in maps
    assert "numpy" not in maps


def test_it_imports_what_this_process_would(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("asyncio", "json", "socket", "wingbeat"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    launched = SupervisorProcess("train-1", Places(str(folder)), lambda _: None)
    assert launched.send_report(0, report(0, 4, size=1).to_text())
    assert _job(folder, 1).workers
    launched.close()


def test_one_that_is_killed_takes_nothing_more_and_that_is_told_once(folder: Path) -> None:
    told: list[str] = []
    launched = SupervisorProcess("train-1", Places(str(folder)), told.append)
    _job(folder)
    os.kill(launched.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while launched.send_report(0, report(0, 1).to_text()):
        assert time.monotonic() < deadline
    assert not launched.send_report(0, "more")
    launched.close()
    assert not launched.send_report(0, "more")
    assert told == ["`wingbeat top` shows this job no more: its supervisor has ended"]
    assert [path.name for path in folder.iterdir()] == ["train-1.sock"]  # it could not
    assert top.running(folder) == []
    assert list(folder.iterdir()) == []


def test_its_end_does_not_end_a_script_that_broken_pipes_end(folder: Path) -> None:
    child = os.fork()
    if not child:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        launched = SupervisorProcess("train-1", Places(str(folder)), lambda _: None)
        launched.kill()
        os._exit(3 + launched.send_report(0, "more"))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


def test_a_scripts_default_timeout_does_not_end_it(folder: Path) -> None:
    before = socket.getdefaulttimeout()
    try:
        socket.setdefaulttimeout(0.001)
        launched = SupervisorProcess("train-1", Places(str(folder)), lambda _: None)
    finally:
        socket.setdefaulttimeout(before)
    os.kill(launched.pid, signal.SIGSTOP)
    threading.Timer(0.2, os.kill, (launched.pid, signal.SIGCONT)).start()
    for second in range(300):  # more than the system keeps
        assert launched.send_report(0, report(0, second).to_text() + 5_000 * " ")
    launched.close()


def test_one_that_is_stopped_is_killed_and_frees_who_waits_for_it(
    folder: Path, start: Callable[[], SupervisorProcess]
) -> None:
    launched = start()
    _job(folder)
    os.kill(launched.pid, signal.SIGSTOP)
    text = report(0, 1).to_text()

    def fill() -> None:
        while launched.send_report(0, text):
            pass

    thread = threading.Thread(target=fill, daemon=True)
    thread.start()
    time.sleep(0.05)
    launched.kill()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_ends_the_workers_is_not_for_it(
    folder: Path, start: Callable[[], SupervisorProcess], number: signal.Signals
) -> None:
    launched = start()
    _job(folder)
    os.kill(launched.pid, number)
    launched.send_report(0, report(0, 1, size=1).to_text())
    assert _job(folder, 1).workers


def test_what_its_user_should_know_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    told: list[str] = []
    launched = SupervisorProcess("x", Places(str(tmp_path / "file")), told.append)
    deadline = time.monotonic() + 30
    while not told:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    launched.close()
    assert told[0].startswith("`wingbeat top` will not find this job: ")
