"""`wingbeat store` and its clients: peers that lack the job's key, or have it and send anything."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from helpers.ports import free_port
from helpers.waiting import until
from wingbeat.errors import RendezvousError, UsageError
from wingbeat.transport import served_store
from wingbeat.transport.served_store import RemoteStore, StoreServer, StoreUnavailable
from wingbeat.transport.torch_store import RejectedValue, TorchStore

KEY = b"a key of a job, long enough"
Serve = Callable[..., StoreServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts servers, and ends those that still run."""
    made: list[StoreServer] = []

    def start(port: int = 0, key: bytes | None = KEY) -> StoreServer:
        made.append(StoreServer(port, key=key))
        return made[-1]

    yield start
    for each in made:
        if each._thread.is_alive():
            each.close()


class Raw:
    """A connection that sends anything."""

    def __init__(self, server: StoreServer) -> None:
        self.socket = socket.create_connection(("127.0.0.1", server.port), 20.0)
        self.file = self.socket.makefile("rb")

    def line(self) -> Any:
        return json.loads(self.file.readline())

    def send(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # it may have closed the connection
            self.socket.sendall(data)

    def rest(self) -> bytes:
        """What else it sends before it closes the connection."""
        try:
            return self.file.read()
        except ConnectionResetError:  # it has not read everything
            return b""

    def close(self) -> None:
        self.file.close()
        self.socket.close()


def member(server: StoreServer, key: bytes | None = KEY) -> RemoteStore:
    return RemoteStore("127.0.0.1", server.port, 10.0, key)


def proof(greeting: list[str], key: bytes = KEY, own: str = "00") -> bytes:
    tag = served_store._tag(key, "connect", greeting[1], greeting[2], own).decode()
    return json.dumps(["prove", own, tag]).encode() + b"\n"


WITHOUT_KEY: dict[str, Callable[[list[str]], bytes]] = {
    "a request": lambda greeting: b'["set", "key", "stolen"]\n',
    "another key": lambda greeting: proof(greeting, b"another key of a job"),
    "no tag": lambda greeting: b'["prove", "", ""]\n',
    "a tag that is no text": lambda greeting: b'["prove", "00", 7]\n',
    "a tag that is not ASCII": lambda greeting: b'["prove", "00", "\\ud800\xc3\xa9"]\n',
    "the tag of another nonce": lambda greeting: proof([*greeting[:2], "0" * 64]),
    "the tag of another end": lambda greeting: json.dumps(
        ["prove", "00", served_store._tag(KEY, "accept", *greeting[1:], "00").decode()]
    ).encode() + b"\n",
    "a proof and a request in one": lambda greeting: b'["prove", "", ""]\n["set", "key", "x"]\n',
    "a long line": lambda greeting: b"[" * 5000 + b"\n",
    "no line": lambda greeting: b"x" * 5000,
    "deep JSON": lambda greeting: b"[" * 1000 + b"\n",
    "no JSON": lambda greeting: b"GET / HTTP/1.1\r\n\r\n",
    "no text": lambda greeting: b"\xff\xfe\n",
}  # fmt: skip


@pytest.mark.parametrize("sent", WITHOUT_KEY)
def test_stranger_without_the_key_is_refused_in_one_line_and_changes_nothing(
    serve: Serve, caplog: pytest.LogCaptureFixture, sent: str
) -> None:
    server = serve()
    store = member(server)
    store.set("key", "value")
    for _ in range(3):
        raw = Raw(server)
        raw.send(WITHOUT_KEY[sent](raw.line()))
        assert set(raw.line()) == {"error"}
        assert raw.rest() == b""
        raw.close()
    assert store.compare_set("key", "?", "?") == b"value"
    [record] = caplog.records
    assert record.getMessage().startswith(("a connection of ", "a request of "))
    assert "127.0.0.1 is refused: " in record.getMessage()
    assert record.getMessage().isprintable()


def test_proof_that_was_recorded_is_refused(serve: Serve) -> None:
    server = serve()
    raw = Raw(server)
    recorded = proof(raw.line())
    raw.send(recorded)
    assert isinstance(raw.line(), str)
    raw.close()
    raw = Raw(server)
    raw.line()
    raw.send(recorded)
    assert set(raw.line()) == {"error"}
    raw.close()


def test_stranger_that_sends_nothing_or_a_byte_at_a_time_is_closed(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_store, "_PROOF_S", 0.2)
    server = serve()
    silent, slow = Raw(server), Raw(server)
    stop = threading.Event()

    def drip() -> None:
        while not stop.wait(0.01):
            slow.send(b"[")

    thread = threading.Thread(target=drip, daemon=True)
    thread.start()
    assert silent.line()[0] == slow.line()[0] == served_store._FORMAT
    assert silent.rest() == slow.rest() == b""
    stop.set()
    thread.join()
    assert member(server).check([])
    for each in (silent, slow):
        each.close()


def test_strangers_are_few_and_keep_no_member_out(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_store, "_PROOF_S", 600.0)
    server = serve()
    store = member(server)
    strangers = [Raw(server) for _ in range(3 * served_store._MAX_STRANGERS)]
    for each in strangers[-served_store._MAX_STRANGERS :]:
        each.line()
    until(lambda: len(server._clients) <= served_store._MAX_STRANGERS + 1)
    assert store.check([])
    for _ in range(5):
        assert member(server).check([])
    for each in strangers:
        each.close()


@pytest.mark.parametrize(("own", "other"), [(KEY, None), (None, KEY), (b"another " + KEY, KEY)])
def test_different_keys_are_one_clear_error(
    serve: Serve, own: bytes | None, other: bytes | None
) -> None:
    server = serve(key=other)
    begin = time.monotonic()
    with pytest.raises(UsageError, match="has another job key, or one of both has none") as raised:
        member(server, own)
    assert time.monotonic() - begin < 5.0, "nothing to wait for"
    assert len(str(raised.value).splitlines()) == 1


SERVERS = {
    "no proof": [b'["wingbeat store 2", "a", "00"]\n', b'"00"\n'],
    "a proof that is no text": [b'["wingbeat store 2", "a", "00"]\n', b"[7]\n"],
    "a proof that is not ASCII": [b'["wingbeat store 2", "a", "00"]\n', b'"\\ud800\xc3\xa9"\n'],
    "what the client has sent": [b'["wingbeat store 2", "a", "00"]\n', b"ECHO"],
    "no key": [b'["wingbeat store 2", "a", ""]\n'],
}


class FakeServer:
    """A program at a port that answers anything: after the first, each in turn to a line."""

    def __init__(self, *answers: bytes, port: int = 0) -> None:
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port = self._listener.getsockname()[1]
        self._answers = answers
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                visitor, _ = self._listener.accept()
                threading.Thread(target=self._answer, args=(visitor,), daemon=True).start()

    def _answer(self, visitor: socket.socket) -> None:
        with visitor, visitor.makefile("rb") as lines, contextlib.suppress(OSError):
            visitor.sendall(self._answers[0])
            for answer, line in zip(self._answers[1:], lines, strict=False):
                tag = json.dumps(json.loads(line)[-1]).encode() + b"\n"
                visitor.sendall(tag if answer == b"ECHO" else answer)


@pytest.mark.parametrize("answers", SERVERS)
def test_server_without_the_key_is_refused(answers: str) -> None:
    fake = FakeServer(*SERVERS[answers])
    with pytest.raises(UsageError, match="has another job key, or one of both has none"):
        RemoteStore("127.0.0.1", fake.port, 5.0, KEY)
    fake.close()


GREETINGS = [b"[" * 1000 + b"\n", b"x" * 5000, b"\n", b"[7, 7, 7]\n", b"\xff\n"]


@pytest.mark.parametrize("greeting", GREETINGS, ids=lambda text: repr(text[:8]))
def test_malformed_greeting_is_one_clear_error(greeting: bytes) -> None:
    fake = FakeServer(greeting)
    with pytest.raises(RendezvousError) as raised:
        RemoteStore("127.0.0.1", fake.port, 0.2)
    assert str(raised.value).isprintable()
    fake.close()


ANSWERS = [
    b"[" * 100_000 + b"\n",
    b"\xff\n",
    b"",
    b'{"error": "\\u001b[2J\\n\\n' + b"x" * 100_000 + b'"}\n',
    b'{"error": [[7]]}\n',
    b"{}\n",
]


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda text: repr(text[:8]))
def test_malformed_answer_makes_the_store_unavailable_in_one_line(
    monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    monkeypatch.setattr(served_store, "REQUEST_S", 2.0)
    fake = FakeServer(b'["wingbeat store 2", "a", ""]\n', answer)
    store = RemoteStore("127.0.0.1", fake.port, 5.0)
    with pytest.raises(StoreUnavailable) as raised:
        store.set("key", "value")
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 1500
    store.close()
    fake.close()


def test_server_that_answers_a_byte_at_a_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_store, "REQUEST_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            with contextlib.suppress(OSError):
                visitor, _ = listener.accept()
                listener.close()
                visitor.sendall(b'["wingbeat store 2", "a", ""]\n')
                for _ in range(2_000):
                    visitor.sendall(b"x")
                    time.sleep(0.01)

        threading.Thread(target=drip, daemon=True).start()
        store = RemoteStore("127.0.0.1", listener.getsockname()[1], 5.0)
        begin = time.monotonic()
        with pytest.raises(StoreUnavailable, match="no answer in time"):
            store.set("key", "value")
        assert time.monotonic() - begin < 5.0
        store.close()


def test_program_at_the_port_of_an_ended_store_is_not_used_and_the_store_is_found_again(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is another user's, of whom clients with a key must not believe a name."""
    monkeypatch.setattr(served_store, "_RETRY_S", 0.02)
    port, journal = free_port(), tmp_path / "journal"
    server = StoreServer(port, journal, KEY)
    store = member(server)
    store.set("key", "value")
    server.close()
    with pytest.raises(StoreUnavailable):
        store.check(["key"])
    asked = threading.Event()

    class Watching(FakeServer):
        def _answer(self, visitor: socket.socket) -> None:
            asked.set()
            super()._answer(visitor)

    fake = Watching(b'["wingbeat store 2", "other", "00"]\n', b'"00"\n', port=port)
    assert asked.wait(20.0)
    fake.close()
    server = StoreServer(port, journal, KEY)

    def found() -> bool:
        with contextlib.suppress(StoreUnavailable):
            return store.check(["key"])
        return False

    until(found)
    store.close()
    server.close()


def test_incomplete_request_ends_its_connection_after_a_deadline(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_store, "_LINE_S", 0.2)
    server = serve(key=None)
    idle, slow = member(server, None), Raw(server)
    slow.line()
    slow.send(b'["set", "key", "')
    assert slow.rest() == b""
    assert idle.check([]), "a client that requests nothing stays"
    slow.close()


def test_incomplete_requests_take_a_bounded_memory(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_store, "_MAX_PENDING", 1 << 20)
    server = serve(key=None)
    store = member(server, None)
    hostile = [Raw(server) for _ in range(20)]
    highest = 0
    for each in hostile:
        each.send(b'["set", "key", "' + b"x" * 200_000)
        until(lambda: server._pending == sum(len(own.data) for own in list(server._clients)))
        highest = max(highest, server._pending)
    assert highest < (1 << 20) + (1 << 17)
    store.set("key", "v" * 100_000)
    assert store.check(["key"])
    for each in hostile:
        each.close()
    until(lambda: server._pending == 0)


def test_clients_that_read_no_answers_take_a_bounded_memory_and_end_after_a_deadline(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 24 << 20
    monkeypatch.setattr(served_store, "_MAX_PENDING", most)
    server = serve(key=None)
    store = member(server, None)
    store.set("large", "v" * (8 << 20))
    monkeypatch.setattr(served_store, "_LINE_S", 0.3)
    hostile = [Raw(server) for _ in range(8)]
    for each in hostile:
        each.line()
        each.send(b'["read", "large"]\n' * 10)
    highest = 0

    def ended() -> bool:
        nonlocal highest
        written = [each.writer.transport.get_write_buffer_size() for each in list(server._clients)]
        highest = max(highest, sum(written))
        return len(server._clients) == 1

    until(ended)
    assert most / 2 < highest <= most + 8 * (1 << 10)
    store.set("key", "value")
    assert store.check(["key"])
    for each in hostile:
        each.close()


def test_large_values_count_with_the_memory_that_they_take(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_store, "MAX_BYTES", 100_000)
    store = member(serve())
    with pytest.raises(StoreUnavailable, match="the store is full"):
        store.set("key", "\U0001f600" * 30_000)


def test_value_that_is_no_unicode_is_rejected_by_its_readers(serve: Serve) -> None:
    server = serve(key=None)
    raw = Raw(server)
    raw.line()
    raw.send(b'["set", "key", "\\ud800"]\n')
    assert raw.line() is None
    store = TorchStore(member(server, None))
    with pytest.raises(RejectedValue, match="key: it is not text"):
        store.get("key", 1.0)
    with pytest.raises(RejectedValue):
        store.claim("key", "value")
    raw.close()


@pytest.mark.parametrize("seed", range(3))
def test_member_that_sends_anything_is_refused_or_served_and_the_others_continue(
    serve: Serve, seed: int
) -> None:
    chance, server = random.Random(seed), serve()
    store = member(server)
    store.set("key", "value")
    valid = [b'["set", "a", "b"]\n', b'["swap", "a", "b", "c"]\n', b'["read", "a"]\n',
             b'["delete", "a"]\n']  # fmt: skip
    for _ in range(40):
        raw = Raw(server)
        raw.send(proof(raw.line()))
        assert isinstance(raw.line(), str)
        for _ in range(chance.randrange(1, 6)):
            data = bytearray(chance.choice(valid))
            for _ in range(chance.randrange(3)):
                data[chance.randrange(len(data))] = chance.randrange(256)
            raw.send(bytes(data))
        raw.send(b"[]\n")
        raw.rest()  # until the connection ends, with an error that may be lost with it
        raw.close()
    assert store.compare_set("key", "?", "?") == b"value"
    until(lambda: len(server._clients) == 1 and server._pending == server._unread == 0)
