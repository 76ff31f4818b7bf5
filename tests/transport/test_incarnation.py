"""A rank is taken for as long as its process runs, and free the moment that it has ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from wingbeat.errors import RendezvousError
from wingbeat.transport import failures
from wingbeat.transport import interfaces as nic
from wingbeat.transport.failures import LivenessListener, ProcessAddress, is_running
from wingbeat.transport.rendezvous import claim_rank
from wingbeat.transport.torch_store import TorchStore

TOKEN = "0" * 32
PROCESS = """
import sys
from wingbeat.transport.failures import LivenessListener
one = LivenessListener("127.0.0.1")
print(one.address.to_text(), flush=True)
sys.stdin.read()
"""


@contextmanager
def process() -> Iterator[tuple[subprocess.Popen[str], ProcessAddress]]:
    """Another process that has a place."""
    started = subprocess.Popen(
        [sys.executable, "-c", PROCESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert started.stdout is not None
        yield started, ProcessAddress.from_text(started.stdout.readline())
    finally:
        started.kill()
        started.communicate()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for what does not come."""
    monkeypatch.setattr(failures, "_PROBE_TIMEOUT_S", 0.3)
    monkeypatch.setattr(failures, "_RETRY_S", 0.01)


def take(store: TorchStore, one: LivenessListener, seconds: float = 0.2) -> bool:
    return claim_rank(store, 1, one.address, seconds, "node1:29500")


def test_first_process_of_a_rank_replaces_none() -> None:
    store, one = TorchStore(dist.HashStore()), LivenessListener("127.0.0.1")
    assert not take(store, one)
    assert is_running(one.address)
    one.close()


@pytest.mark.usefixtures("quick")
def test_a_rank_whose_process_runs_is_refused_with_its_address() -> None:
    store = TorchStore(dist.HashStore())
    first, second = LivenessListener("127.0.0.1"), LivenessListener("127.0.0.1")
    take(store, first)
    for _ in range(150):  # more often than connections wait in the kernel
        with pytest.raises(RendezvousError, match=r"rank 1 is taken: .*127\.0\.0\.1 \(port "):
            take(store, second, 0.0)
    first.close()
    assert take(store, second), "it comes in the place of one that has ended"
    second.close()


@pytest.mark.usefixtures("quick")
def test_refusal_of_a_rank_of_a_replica_names_the_variables_of_replicas() -> None:
    store = TorchStore(dist.HashStore())
    first, second = LivenessListener("127.0.0.1"), LivenessListener("127.0.0.1")
    take(store, first)
    with pytest.raises(RendezvousError, match=r"WINGBEAT_JOB_ID .*WINGBEAT_REPLICA\b") as caught:
        claim_rank(store, 1, second.address, 0.01, "node1:29400", replicas=True)
    assert "MASTER_PORT" not in str(caught.value)
    first.close()
    second.close()


@pytest.mark.usefixtures("quick")
def test_a_process_that_is_killed_frees_its_rank_at_once_and_one_that_is_stopped_does_not() -> None:
    store = TorchStore(dist.HashStore())
    own = LivenessListener("127.0.0.1")
    with process() as (other, place):
        claim_rank(store, 1, place, 1.0, "")
        other.send_signal(signal.SIGSTOP)
        assert is_running(place)
        with pytest.raises(RendezvousError, match="rank 1 is taken"):
            take(store, own)
        other.kill()
        other.wait(10)
        assert take(store, own, 0.0)
    own.close()


def test_a_killed_process_is_not_waited_for_and_what_it_published_counts() -> None:
    store = TorchStore(dist.HashStore())
    with process() as (other, place):
        store.set("here/1", place.to_text())
        begun = time.monotonic()
        assert failures.published_failure(store, 1, 0.5) == ""
        assert time.monotonic() - begun >= 0.5, "it runs, and may still publish"
        other.kill()
        other.wait(10)
        begun = time.monotonic()
        assert failures.FailureAttribution(store, 0, 3, 60.0).root_cause(1) == 1
        assert time.monotonic() - begun < 1.5 < failures.ANSWER_TIMEOUT_S
        store.set("waited/1", "2 an average")
        assert failures.FailureAttribution(store, 0, 3, 60.0).awaited_by(1, 30.0) == 2


@pytest.mark.usefixtures("quick")
def test_a_process_that_is_ending_is_waited_for() -> None:
    store = TorchStore(dist.HashStore())
    first, second = LivenessListener("127.0.0.1"), LivenessListener("127.0.0.1")
    take(store, first)
    ending = threading.Timer(0.3, first.close)
    ending.start()
    assert take(store, second, 60.0)
    ending.join()
    second.close()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("trouble", [OSError(105, "No buffer space available"), TimeoutError()])
def test_a_connection_that_fails_once_does_not_show_that_a_process_has_ended(
    trouble: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures, real = iter([trouble, trouble]), socket.create_connection

    def connect(address: tuple[str, int], seconds: float) -> socket.socket:
        for error in failures:
            raise error
        return real(address, seconds)

    one = LivenessListener("127.0.0.1")
    monkeypatch.setattr(socket, "create_connection", connect)
    assert is_running(one.address)
    one.close()


@pytest.mark.usefixtures("quick")
def test_port_that_closes_once_without_a_token_is_probed_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = ProcessAddress("127.0.0.1", server.getsockname()[1], TOKEN)

        def serve() -> None:
            for answer in (b"", TOKEN.encode()):
                with server.accept()[0] as caller:
                    caller.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        assert is_running(place)
        thread.join()


@pytest.mark.usefixtures("quick")
def test_a_port_that_another_program_has_since_is_no_process_of_the_job() -> None:
    for answer in (b"", b"220 mail", b"x" * 32, b"x" * 100):
        with socket.create_server(("127.0.0.1", 0)) as server:
            place = ProcessAddress("127.0.0.1", server.getsockname()[1], TOKEN)

            def serve(server: socket.socket = server, answer: bytes = answer) -> None:
                for _ in range(failures._PROBES if len(answer) < len(TOKEN) else 1):
                    with server.accept()[0] as caller:
                        caller.sendall(answer)

            thread = threading.Thread(target=serve)
            thread.start()
            assert not is_running(place)
            thread.join()


@pytest.mark.usefixtures("quick")
def test_one_of_two_processes_that_restart_together_has_the_rank() -> None:
    store = TorchStore(dist.HashStore())
    before, first, second = (LivenessListener("127.0.0.1") for _ in range(3))
    take(store, before)
    before.close()
    results: list[bool | str] = []

    def come(one: LivenessListener) -> None:
        try:
            results.append(take(store, one))
        except RendezvousError as error:
            results.append(str(error)[:15])

    threads = [threading.Thread(target=come, args=(one,)) for one in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(str, results)) == ["True", "rank 1 is taken"]
    first.close()
    second.close()


@pytest.mark.usefixtures("quick")
def test_a_forked_child_that_outlives_its_parent_does_not_keep_the_rank() -> None:
    # As a process of a data loader does, the child ends some time after its parent.
    ends = "import os, time; os.fork() or time.sleep(60); os.kill(os.getpid(), 9)"
    script = PROCESS.replace("sys.stdin.read()", ends)
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as started:
        try:
            assert started.stdout is not None
            place = ProcessAddress.from_text(started.stdout.readline())
            started.wait(20)
            assert not is_running(place)
        finally:
            os.killpg(started.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "7",
        "[" * 100_000,
        '["h", 1]',
        '["h", "1", "t"]',
        f'["h", 0, "{TOKEN}"]',
        f'["h", 70000, "{TOKEN}"]',
        '["h", 1, "short"]',
    ],
)
def test_a_malformed_address_is_refused(text: str) -> None:
    store, one = TorchStore(dist.HashStore()), LivenessListener("127.0.0.1")
    store.set("here/1", text)
    with pytest.raises(RendezvousError, match="rank 1: the store at node1:29500 has a malformed"):
        take(store, one)
    one.close()


def test_a_hosts_own_name_that_means_loopback_is_not_published(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On another host it would mean that host."""
    card = nic.Interface("eth0", "127.0.0.9", "127.0.0.0/8")
    monkeypatch.setattr(nic, "local", lambda: nic.Host("me", (card,)))
    found = [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.1.1", 1))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    for towards, address in (("node1", "127.0.0.9"), ("127.0.1.1", "127.0.0.1")):
        one = LivenessListener(towards)
        assert one.address.host == address
        one.close()


def test_listener_survives_a_temporary_lack_of_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(failures, "_RETRY_S", 0.01)
    errors = iter([OSError(24, "Too many open files")])
    real = socket.socket.accept

    def accept(self: socket.socket) -> object:
        for error in errors:
            raise error
        return real(self)

    monkeypatch.setattr(socket.socket, "accept", accept)
    one = LivenessListener("127.0.0.1")
    assert is_running(one.address)
    one.close()


def test_close_ends_the_listeners_thread() -> None:
    one = LivenessListener("127.0.0.1")
    one.close()
    one.close()
    deadline = time.monotonic() + 10
    while any(t.name == "wingbeat-incarnation" for t in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
