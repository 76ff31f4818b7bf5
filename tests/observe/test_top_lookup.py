"""Finding a job, and what answers that is none."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.reports import job
from wingbeat.errors import UsageError
from wingbeat.observe import top
from wingbeat.observe.top import JobLost

Serve = Callable[[str, bytes], None]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """``serve(name, text)``: a socket that gives everybody this text."""
    listening: list[socket.socket] = []

    def begin(name: str, text: bytes) -> None:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(tmp_path / f"{name}.sock"))
        listener.listen()
        listening.append(listener)

        def answer() -> None:
            while True:
                try:
                    visitor, _ = listener.accept()
                except OSError:
                    return
                with visitor:
                    try:
                        visitor.sendall(text)
                    except OSError:
                        pass

        threading.Thread(target=answer, daemon=True).start()

    yield begin
    for each in listening:
        each.shutdown(socket.SHUT_RDWR)
        each.close()


def _text(name: str = "train-1") -> bytes:
    return json.dumps({**job(2).to_json(), "name": name}).encode()


def test_the_only_job_needs_no_name(tmp_path: Path, serve: Serve) -> None:
    serve("train-1", _text())
    found = top.find("", tmp_path)
    assert (found.name, found.query().name, len(found.query().workers)) == ("train-1", "train-1", 2)


def test_sockets_are_found_by_name(tmp_path: Path, serve: Serve) -> None:
    for name in ("b-2", "a-1"):
        serve(name, _text(name))
    for name in ("a-1.4711", "notes.txt"):
        (tmp_path / name).write_text("")
    assert [found.name for found in top.running(tmp_path)] == ["a-1", "b-2"]
    assert top.running(tmp_path / "none") == []


def test_one_of_several_is_named(tmp_path: Path, serve: Serve) -> None:
    for name in ("train-1", "train-2", "my-eval-3"):
        serve(name, _text(name))
    with pytest.raises(UsageError, match="3 jobs run here: my-eval-3, train-1, train-2; name one"):
        top.find("", tmp_path)
    assert top.find("train-2", tmp_path).query().name == "train-2"
    assert top.find("my-eval", tmp_path).query().name == "my-eval-3"
    with pytest.raises(UsageError, match="2 jobs run here: train-1, train-2"):
        top.find("train", tmp_path)


def test_a_name_that_no_job_has(tmp_path: Path, serve: Serve) -> None:
    serve("train-1", _text())
    with pytest.raises(UsageError, match=r"unknown job 'trian-1' \(did you mean 'train-1'\?\)"):
        top.find("trian-1", tmp_path)


def test_no_job_at_all_says_where_to_look(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(UsageError, match=r"no wingbeat job of this user.*host of rank 0"):
            top.find("", folder)


def test_sockets_of_the_dead_are_removed_and_others_stay(tmp_path: Path, serve: Serve) -> None:
    serve("train-1", _text())
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "dead-2.sock"))
    (tmp_path / "file-3.sock").mkdir()  # nothing that a job has made
    assert [found.name for found in top.running(tmp_path)] == ["train-1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file-3.sock", "train-1.sock"]


@pytest.mark.parametrize("how", ["link", "open", "another user's"])
def test_what_others_may_have_put_there_is_neither_asked_nor_removed(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "own"
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / "train-1.sock"))
    if how == "link":
        (tmp_path / "link").symlink_to(folder)
        folder = tmp_path / "link"
    elif how == "open":
        folder.chmod(0o777)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 4711)
    with pytest.raises(UsageError, match=r"jobs are not searched in .*of this user alone"):
        top.find("", folder)
    assert [path.name for path in folder.iterdir()] == ["train-1.sock"]


@pytest.mark.parametrize("text", [b"", b"hello", b"{}", b"\xff\xfe", b"[" * 100_000])
def test_what_answers_and_is_no_job_is_one_clear_error(
    tmp_path: Path, serve: Serve, text: bytes
) -> None:
    serve("train-1", text)
    with pytest.raises(JobLost, match="what answers as train-1 is no wingbeat job") as raised:
        top.find("train-1", tmp_path).query()
    assert "\n" not in str(raised.value)


def test_an_answer_without_end_is_cut(
    tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top, "LARGEST", 1 << 20)
    serve("train-1", b"x" * (8 << 20))
    with pytest.raises(JobLost, match="more than 1048576 bytes"):
        top.find("train-1", tmp_path).query()


def test_who_never_answers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "TIMEOUT_S", 0.1)
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(tmp_path / "mute-1.sock"))
        mute.listen()
        with pytest.raises(JobLost, match="mute-1 has ended, or does not answer"):
            top.find("mute-1", tmp_path).query()


@pytest.fixture
def dripping(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of a server that sends bytes one by one, so that no wait for a byte times out."""
    monkeypatch.setattr(top, "TIMEOUT_S", 0.3)
    listener = socket.create_server(("127.0.0.1", 0))

    def drip() -> None:
        with contextlib.suppress(OSError):
            visitor, _ = listener.accept()
            with visitor:
                for _ in range(2_000):
                    visitor.sendall(b"H")
                    time.sleep(0.01)

    threading.Thread(target=drip, daemon=True).start()
    yield listener.getsockname()[1]
    listener.close()


def test_who_answers_byte_by_byte_is_given_up(dripping: int) -> None:
    begin = time.monotonic()
    with pytest.raises(JobLost, match=f"no wingbeat job answers at :{dripping}: timed out"):
        top.find(f":{dripping}").query()
    assert time.monotonic() - begin < 10.0


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\x1b]0;owned\x07\x1b[2J\r\n\r\n{}",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 404 Not Found\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n\x1b[2J",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
        b"\xff" * 100_000,
    ],
)
def test_what_answers_at_a_port_and_is_no_job_is_one_line_without_its_control_characters(
    answer: bytes,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve_once() -> None:
            visitor, _ = listener.accept()
            with visitor, contextlib.suppress(OSError):
                visitor.recv(4096)
                visitor.sendall(answer)

        thread = threading.Thread(target=serve_once, daemon=True)
        thread.start()
        with pytest.raises(JobLost) as raised:
            top.find(f":{listener.getsockname()[1]}").query()
        thread.join(10)
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 250


def test_a_host_that_no_name_can_be_is_one_clear_error() -> None:
    with pytest.raises(JobLost, match=r"no wingbeat job answers at x{80}\.x:80: "):
        top.find("x" * 80 + ".x:80").query()


def test_a_job_that_has_ended_since_it_was_found(tmp_path: Path, serve: Serve) -> None:
    serve("train-1", _text())
    found = top.find("", tmp_path)
    (tmp_path / "train-1.sock").unlink()
    with pytest.raises(JobLost, match="train-1 has ended"):
        found.query()


def test_another_hosts_job_is_asked_by_http(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        text = _text()

        def answer() -> None:
            visitor, _ = listener.accept()
            with visitor:
                asked.append(visitor.recv(4096))
                head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\n\r\n"
                visitor.sendall(head.encode() + text)

        asked: list[bytes] = []
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        port = listener.getsockname()[1]
        assert top.find(f"localhost:{port}").query().name == "train-1"
        thread.join(10)
    assert asked[0].startswith(b"GET /job HTTP/1.0\r\n")
    with pytest.raises(JobLost, match=f"no wingbeat job answers at :{port}: "):
        top.find(f":{port}").query()


@pytest.mark.parametrize("address", ["host:", "host:x", "host:0", "host:65536", ":"])
def test_an_address_without_a_port_is_one_clear_error(address: str) -> None:
    with pytest.raises(UsageError, match="HOST:PORT needs a port from 1 to 65535"):
        top.find(address)
