"""The store of `wingbeat store`: requests, its end, its journal, and hostile clients."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers import other_user
from helpers.ports import free_port
from wingbeat.errors import RendezvousError, UsageError
from wingbeat.transport import served_store
from wingbeat.transport.served_store import RemoteStore, StoreServer, StoreUnavailable
from wingbeat.transport.torch_store import TorchStore

Serve = Callable[..., StoreServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts servers, and ends those that still run."""
    made: list[StoreServer] = []

    def start(port: int = 0, journal: Path | None = None) -> StoreServer:
        made.append(StoreServer(port, journal))
        return made[-1]

    yield start
    for each in made:
        if each._thread.is_alive():
            each.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_store, "_RETRY_S", 0.02)


def client(server: StoreServer, seconds: float = 10.0) -> RemoteStore:
    return RemoteStore("127.0.0.1", server.port, seconds)


def answers(store: RemoteStore, key: str = "key") -> bool:
    try:
        store.check([key])
    except StoreUnavailable:
        return False
    return True


def until(done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 10.0
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def test_requests_have_the_results_of_torchs_stores(serve: Serve) -> None:
    store = client(serve())
    assert not store.check(["key"])
    assert store.compare_set("key", "?", "value") == b"?"
    assert not store.check(["key"])
    assert store.compare_set("key", "", "first") == b"first"
    assert store.compare_set("key", "", "second") == b"first"
    assert store.compare_set("key", "first", "third") == b"third"
    store.set("ключ", "line\nline")
    assert store.compare_set("ключ", "?", "?").decode() == "line\nline"
    assert store.delete_key("key")
    assert not store.delete_key("key")
    assert store.check([])
    assert not store.check(["ключ", "key"])


def test_parts_have_keys_of_their_own_and_first_claim_wins(serve: Serve) -> None:
    server = serve()
    one, other = TorchStore(client(server)), TorchStore(client(server).under("a"))
    assert one.under("a").claim("key", "first") == "first"
    assert other.claim("key", "second") == "first"
    assert not one.has("key")
    assert other.get("key", 1.0) == "first"


def test_client_of_an_ended_server_fails_at_once_and_logs_one_line(
    serve: Serve, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve()
    store = client(server)
    store.set("key", "value")
    server.close()
    begun = time.monotonic()
    for _ in range(1000):
        with pytest.raises(StoreUnavailable, match=r"`wingbeat store` at .* does not answer"):
            store.set("key", "value")
    assert time.monotonic() - begun < 5.0
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no worker can rejoin until it is started again there" in caplog.text


def test_client_continues_after_a_restart_with_the_journal(
    serve: Serve, quick: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    port, journal = free_port(), tmp_path / "store.journal"
    server = serve(port, journal)
    store = client(server)
    for life in range(3):
        if life:
            server = serve(port, journal)
        until(lambda: answers(store), "it does not connect again")
        for other in range(life):
            assert store.compare_set(str(other), "?", "?") == b"value"
        store.set(str(life), "value")
        store.set("deleted", "value")
        store.delete_key("deleted")
        server.close()
    server = serve(port, journal)
    until(lambda: answers(store), "it does not connect again")
    assert not store.check(["deleted"])
    assert caplog.text.count("answers again") == 3
    assert journal.stat().st_mode & 0o777 == 0o600


def test_client_fails_for_good_after_a_restart_without_the_content(
    serve: Serve, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Others may have read what is lost, such as an entry of the membership log."""
    port = free_port()
    server = serve(port)
    store = client(server)
    store.set("key", "value")
    server.close()
    assert not answers(store)
    serve(port)
    until(lambda: "without its content; start it with --journal" in caplog.text, "nothing is said")
    assert not answers(store)
    assert len(caplog.records) == 2


def test_get_waits_for_a_server_that_is_started_again(
    serve: Serve, quick: None, tmp_path: Path
) -> None:
    port, journal = free_port(), tmp_path / "store.journal"
    server = serve(port, journal)
    store = TorchStore(client(server))
    store.set("key", "value")
    server.close()
    with pytest.raises(TimeoutError):
        store.get("key", 0.1)
    serve(port, journal)
    assert store.get("key", 10.0) == "value"


def test_last_line_of_a_killed_server_may_be_incomplete(serve: Serve, tmp_path: Path) -> None:
    journal = tmp_path / "store.journal"
    server = serve(0, journal)
    client(server).set("key", "value")
    server.close()
    with journal.open("a") as file:
        file.write('["key", "val')
    server = serve(0, journal)
    store = client(server)
    assert store.compare_set("key", "?", "?") == b"value"
    store.set("other", "value")
    server.close()
    assert client(serve(0, journal)).check(["key", "other"])


def test_content_from_before_a_reboot_is_dropped(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The last changes may not have reached the disk."""
    journal = tmp_path / "store.journal"
    server = serve(0, journal)
    client(server).set("key", "value")
    server.close()
    monkeypatch.setattr(served_store, "_boot", lambda: "another")
    assert not client(serve(0, journal)).check(["key"])
    assert "its content may be incomplete, and is dropped" in caplog.text


NO_JOURNAL = [
    b"{\n",
    b'["wingbeat store 0", "a", "b"]\n',
    b"[1]\n",
    b"\0\n",
    b"a secret without a line feed",
    b'["wingbeat stor2',
    b"\xff\xfe\n",
    b"[" * 100_000 + b"\n",
]


@pytest.mark.parametrize("text", NO_JOURNAL, ids=lambda text: repr(text[:12]))
def test_file_that_is_no_journal_is_refused_and_unchanged(text: bytes, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(text)
    file.chmod(0o600)
    with pytest.raises(UsageError, match="this is not a journal of `wingbeat store`"):
        StoreServer(0, file)
    assert file.read_bytes() == text


def test_first_line_of_a_killed_server_may_be_incomplete(serve: Serve, tmp_path: Path) -> None:
    journal = tmp_path / "store.journal"
    client(serve(0, journal)).set("key", "value")
    first = journal.read_bytes().partition(b"\n")[0]
    for place in (0, 3, len(first) - 1):
        torn = tmp_path / f"{place}.journal"
        torn.write_bytes(first[:place])
        torn.chmod(0o600)
        assert not client(serve(0, torn)).check(["key"])


@pytest.mark.parametrize("how", ["others may read it", "a pipe", "a link to another's file"])
def test_journal_that_others_have_access_to_is_refused(how: str, tmp_path: Path) -> None:
    journal = tmp_path / "store.journal"
    if how == "a pipe":
        os.mkfifo(journal, 0o600)
    elif how == "others may read it":
        journal.touch(mode=0o644)
    else:
        journal.symlink_to("/etc/passwd")
    why = r"not a file of this user alone: chmod 600|Permission denied"
    with pytest.raises(UsageError, match=why) as raised:
        StoreServer(0, journal)
    assert len(str(raised.value).splitlines()) == 1


@other_user.needs_root
def test_journal_that_another_user_has_created_first_is_refused(shared_folder: Path) -> None:
    journal = shared_folder / "store.journal"
    assert other_user.run(lambda: journal.touch(mode=0o600)) == "None"
    with pytest.raises(UsageError, match=r"this user alone|Permission denied"):
        StoreServer(0, journal)
    assert journal.read_bytes() == b""


def test_journal_is_written_anew_once_it_has_outgrown_its_content(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reports of workers replace each other every second, for weeks."""
    monkeypatch.setattr(served_store, "_COMPACT_BYTES", 10_000)
    journal = tmp_path / "store.journal"
    server = serve(0, journal)
    store = client(server)
    store.set("first", "value")
    for number in range(100):
        store.set("report", f"{number} " + "r" * 1000)
        store.set("deleted", "value")
        store.delete_key("deleted")
        assert journal.stat().st_size < 16_000
    assert journal.stat().st_mode & 0o777 == 0o600
    with pytest.raises(UsageError, match="another `wingbeat store` uses this file"):
        StoreServer(0, journal)
    server.close()
    assert [path.name for path in tmp_path.iterdir()] == ["store.journal"]
    store = client(serve(0, journal))
    assert store.compare_set("first", "?", "?") == b"value"
    assert store.compare_set("report", "?", "?").startswith(b"99 rrr")
    assert not store.check(["deleted"])


def test_journal_that_cannot_be_written_anew_grows_further(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    @contextlib.contextmanager
    def fails(path: Path) -> Iterator[None]:
        raise UsageError(f"cannot write {path}: No space left on device")
        yield

    monkeypatch.setattr(served_store, "_COMPACT_BYTES", 1_000)
    monkeypatch.setattr(served_store, "replacing", fails)
    journal = tmp_path / "store.journal"
    server = serve(0, journal)
    store = client(server)
    for number in range(10):
        store.set("key", f"{number} " + "r" * 1000)
    server.close()
    assert "No space left on device; it grows further" in caplog.text
    assert client(serve(0, journal)).compare_set("key", "?", "?").startswith(b"9 r")


def test_journal_of_a_running_server_is_refused(serve: Serve, tmp_path: Path) -> None:
    serve(0, tmp_path / "journal")
    with pytest.raises(UsageError, match="another `wingbeat store` uses this file"):
        StoreServer(0, tmp_path / "journal")


def test_journal_that_cannot_be_written_is_deleted(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A restart from an incomplete journal would lose what others have read."""
    journal = tmp_path / "journal"
    server = serve(0, journal)
    assert server._journal is not None
    assert server._journal._file is not None
    server._journal._file.close()
    server._journal._file = open("/dev/full", "wb")  # noqa: SIM115
    store = client(server)
    store.set("key", "value")
    assert store.check(["key"])
    assert not journal.exists()
    assert "the store continues without one" in caplog.text


HOSTILE = [
    b"\n",
    b"{}\n",
    b"[]\n",
    b'["set", "key"]\n',
    b'["set", "key", 1]\n',
    b'["set", "key", "value", "more"]\n',
    b'["read", ["key"]]\n',
    b'["eval", "1"]\n',
    b"\xff\xfe\n",
    b"[" * 100_000 + b"\n",
    json.dumps(["set", "k" * 5000, "value"]).encode() + b"\n",
]


@pytest.mark.parametrize("line", HOSTILE, ids=lambda line: repr(line[:12]))
def test_malformed_request_ends_its_connection_only(serve: Serve, line: bytes) -> None:
    server = serve()
    store = client(server)
    with socket.create_connection(("127.0.0.1", server.port), 10.0) as raw, raw.makefile("rb") as f:
        f.readline()
        raw.sendall(line)
        assert "error" in json.loads(f.readline())
        assert f.read() == b""
    store.set("key", "value")
    assert store.check(["key"])


def test_full_server_refuses_values_and_continues(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_store, "MAX_BYTES", 300)
    store = client(serve())
    store.set("key", "v" * 80)
    with pytest.raises(StoreUnavailable, match="the store is full"):
        store.set("other", "v" * 80)


@pytest.mark.parametrize("greeting", [b"", b"SSH-2.0\r\n", b'["wingbeat store 9", "a"]\n', b"{}\n"])
def test_other_programs_at_the_port_are_refused(greeting: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            while True:
                try:
                    peer = listener.accept()[0]
                except OSError:
                    return
                with peer:
                    peer.sendall(greeting)

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(RendezvousError):
            RemoteStore("127.0.0.1", listener.getsockname()[1], 0.2)
        listener.shutdown(socket.SHUT_RDWR)


def test_silent_server_fails_a_request_after_its_deadline(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(served_store, "REQUEST_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            peer = listener.accept()[0]
            peer.sendall(b'["wingbeat store 2", "a", ""]\n')
            listener.close()
            time.sleep(1.0)
            peer.close()

        threading.Thread(target=greet, daemon=True).start()
        store = RemoteStore("127.0.0.1", listener.getsockname()[1], 5.0)
        with caplog.at_level(logging.WARNING), pytest.raises(StoreUnavailable, match="in time"):
            store.set("key", "value")
        store.close()
