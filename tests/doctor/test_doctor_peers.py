"""Processes that meet at a store, as threads: what each of them reports.

Two hosts are two addresses of loopback. The store and the connections are real ones.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from helpers.hosts import GOOD, facts_of
from helpers.ports import free_port
from wingbeat.doctor import peers
from wingbeat.doctor.checks import FAILED, Finding
from wingbeat.doctor.facts import Facts, Nic, Place, reach
from wingbeat.doctor.peers import Rendezvous, Result
from wingbeat.transport.interfaces import Host, Interface

KEY = b"0123456789abcdef"
LONG, SHORT = 60.0, 4.0


def host_at(rank: int) -> dict[str, Any]:
    """Facts of a host whose only interface is an address of loopback."""
    lo = Interface("lo", f"127.0.0.{rank + 1}", "127.0.0.0/8")
    return {"host": Host(f"host {rank}", (lo,)), "nics": (Nic(name="lo", mtu=65536),)}


Examine = Callable[..., "Future[Result]"]


@pytest.fixture
def examine() -> Iterator[Examine]:
    """Start a process of a job, as a thread."""
    port = free_port()
    with ThreadPoolExecutor(8) as pool:

        def start(
            own: Facts, *, key: bytes | None = KEY, timeout: float = LONG, **changes: Any
        ) -> Future[Result]:
            given = {"size": own.size, "host": "127.0.0.1", "port": port, "serves": own.rank == 0}
            rendezvous = Rendezvous(**{"rank": own.rank, **given, **changes})
            return pool.submit(
                lambda: peers.examine(own, rendezvous, key, timeout=timeout, named=["lo"])
            )

        yield start


def failures(result: Result) -> list[Finding]:
    return [each for each in result.findings if each.status == FAILED]


def test_two_hosts_that_work_are_one_report_of_rank_0(examine: Examine) -> None:
    first, second = (examine(facts_of(rank, **host_at(rank))) for rank in range(2))
    assert second.result() == Result()
    done = first.result()
    assert failures(done) == []
    assert (done.failed, done.hosts) == (False, 2)
    values = {each.check: each.value for each in done.findings}
    assert values["connections"].startswith("2 of 2, each direction")
    assert values["clocks"].startswith("at most 0.")
    assert values["store"].startswith("served at 127.0.0.1:")


def test_ranks_of_one_host_check_its_named_interfaces(examine: Examine) -> None:
    lacks = {**host_at(0), "host": Host("host 0", (Interface("eth0", "10.0.0.1", "10.0.0.0/24"),))}
    first, _ = (examine(facts_of(rank, **lacks)) for rank in range(2))
    assert "unknown interface 'lo'" in "".join(each.value for each in failures(first.result()))


def test_hosts_with_several_ranks_connect_once(examine: Examine) -> None:
    started = [examine(facts_of(rank, size=4, **host_at(rank // 2))) for rank in range(4)]
    done, *others = (each.result() for each in started)
    assert others == [Result()] * 3
    assert failures(done) == []
    assert any(each.value.startswith("2 of 2, each direction") for each in done.findings)


def test_versions_that_differ_fail_on_both_ranks(examine: Examine) -> None:
    first = examine(facts_of(0, **host_at(0)))
    second = examine(facts_of(1, torch="2.12", **host_at(1)))
    assert second.result() == Result(failed=True)
    [finding] = failures(first.result())
    assert "torch differs: 2.11.0 on rank 0; 2.12 on rank 1" in finding.value


def test_a_missing_rank_is_named_before_the_timeout(examine: Examine) -> None:
    begin = time.monotonic()
    started = [examine(facts_of(rank, size=3, **host_at(rank)), timeout=SHORT) for rank in (0, 2)]
    done = started[0].result()
    assert time.monotonic() - begin < 3 * SHORT
    [finding] = failures(done)
    assert "rank 1 of 3 did not come within 2 s" in finding.value
    assert "node0 (rank 0), node2 (rank 2)" in finding.value
    assert any(each.value.startswith("2 of 2, each direction") for each in done.findings)
    assert started[1].result().failed


@pytest.mark.parametrize(("first", "second"), [(KEY, KEY + b"?"), (KEY, None), (None, KEY)])
def test_another_job_key_is_named_on_both_ranks(
    examine: Examine, first: bytes | None, second: bytes | None
) -> None:
    started = [
        examine(facts_of(rank, **host_at(rank)), key=key, timeout=20.0)
        for rank, key in enumerate((first, second))
    ]
    for each in started:
        [finding] = failures(each.result())
        assert finding.check == "job key"
        assert "set the same WINGBEAT_JOB_KEY on all workers" in finding.remedy


def test_without_a_key_hosts_connect_too(examine: Examine) -> None:
    started = [examine(facts_of(rank, **host_at(rank)), key=None) for rank in range(2)]
    assert [failures(each.result()) for each in started] == [[], []]


def test_two_processes_of_a_rank_are_named_by_rank_0_and_the_second(examine: Examine) -> None:
    facts = [facts_of(rank, size=3, **host_at(rank)) for rank in range(3)]
    first, second = (examine(own, timeout=20.0) for own in facts[:2])
    again = examine(replace(facts[1], hostname="node9", secret="drawn"), timeout=20.0)
    [loser], _ = wait((second, again), return_when=FIRST_COMPLETED)
    examine(facts[2], timeout=20.0).result()
    for each in (first, loser):
        [finding] = failures(each.result())
        assert "two processes have rank 1, on " in finding.value
        assert {"node1", "node9"} <= set(finding.value.split())
        assert "RANK of its own" in finding.remedy


def test_a_rank_with_other_facts_is_a_version(examine: Examine, monkeypatch: Any) -> None:
    first = examine(facts_of(0, **host_at(0)), timeout=20.0)
    made = peers.to_json
    monkeypatch.setattr(
        peers,
        "to_json",
        lambda value: {"rank": 1} if getattr(value, "rank", 0) == 1 else made(value),
    )
    second = examine(facts_of(1, **host_at(1)), timeout=20.0)
    [finding] = failures(first.result())
    assert "rank 1 sent a malformed value" in finding.value
    assert "one version of wingbeat" in finding.remedy
    assert second.result().failed


def test_rank_0_that_cannot_serve_names_the_port(examine: Examine) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        done = examine(facts_of(0), port=port, timeout=SHORT).result()
    [finding] = failures(done)
    assert f"127.0.0.1:{port}" in finding.value
    assert "set another MASTER_PORT" in finding.remedy


@pytest.mark.parametrize(
    ("host", "value", "remedy"),
    [
        ("no-such-host.invalid", "cannot be resolved", "getent hosts no-such-host.invalid"),
        ("192.0.2.99", "not an address of this host", "set MASTER_ADDR on all workers"),
    ],
)
def test_rank_0_that_is_not_at_its_address_names_the_address(
    examine: Examine, host: str, value: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def times_out(*_: Any, **__: Any) -> None:  # as torch does, after the timeout or later
        raise RuntimeError("The client socket has timed out")

    monkeypatch.setattr(peers, "tcp_store", times_out)
    [finding] = failures(examine(facts_of(0), host=host, timeout=SHORT).result())
    assert finding.check == "store"
    assert value in finding.value
    assert remedy in finding.remedy


def test_a_store_that_none_serves_is_refused_after_half_of_the_timeout(examine: Examine) -> None:
    begin = time.monotonic()
    [finding] = failures(examine(facts_of(1), timeout=SHORT).result())
    assert SHORT / 4 < time.monotonic() - begin < SHORT
    assert "Connection refused" in finding.value
    assert "loopback" in finding.remedy


def test_a_store_that_ends_is_reported(examine: Examine) -> None:
    first = examine(facts_of(0, size=3), timeout=SHORT)
    second = examine(facts_of(1, size=3, hostname="late"), timeout=LONG, rank=1)
    assert first.result().failed
    assert second.result().failed


# -- one connection


def filled(listener: socket.socket, stack: list[socket.socket]) -> None:
    """Fill the queue of a listener, so that the kernel drops what comes next."""
    for _ in range(3):
        stack.append(socket.socket())
        stack[-1].setblocking(False)
        stack[-1].connect_ex(listener.getsockname())


@pytest.fixture
def route() -> Iterator[tuple[socket.socket, Any]]:
    """A listener at another host's address, and the route to it."""
    with socket.create_server(("127.0.0.2", 0), backlog=0) as listener:
        here, there = (
            Place(name="lo", address=f"127.0.0.{n}", subnet="127.0.0.0/8", port=port)
            for n, port in ((1, 1), (2, listener.getsockname()[1]))
        )
        yield listener, peers._Route(0, 1, 0, here, there)


def test_a_host_that_does_not_answer_is_a_timeout(route: Any) -> None:
    listener, way = route
    held: list[socket.socket] = []
    filled(listener, held)
    found = peers.try_path(way, KEY, 0.5, 0.5)
    for each in held:
        each.close()
    assert found.reach.outcome == "timeout"
    assert found.reach.detail == "no answer within 0.5 s"


def test_a_host_that_refuses_is_told_from_one_that_is_silent(route: Any) -> None:
    listener, way = route
    listener.close()
    assert peers.try_path(way, KEY, 5.0, 5.0).reach.outcome == "refused"


def await_answer(way: Any) -> None:
    """Try a path until it is answered: the thread of an earlier connection has to end."""
    deadline = time.monotonic() + LONG
    while (found := peers.try_path(way, KEY, 5.0, 5.0)).reach.outcome != "ok":
        assert time.monotonic() < deadline, found


def test_a_connection_that_failed_leaves_its_slot_to_the_next(
    route: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener, way = route
    monkeypatch.setattr(peers, "_MAX_SERVED", 1)
    end = peers._serve(listener, 1, KEY)
    assert peers.try_path(way, KEY + b"?", 5.0, 5.0).reach.outcome == "handshake"
    await_answer(way)
    end()


def test_a_process_with_another_key_is_a_failed_handshake(route: Any) -> None:
    listener, way = route
    end = peers._serve(listener, 1, KEY + b"?")
    found = peers.try_path(way, KEY, 5.0, 5.0)
    end()
    assert found.reach.outcome == "handshake"


@pytest.mark.parametrize("way", ["there", "back"])
def test_a_bulk_that_stalls_is_reported_with_its_direction(
    route: Any, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener, target = route
    monkeypatch.setattr(peers, "_replies", lambda connection: replies(connection, way))
    end = peers._serve(listener, 1, KEY)
    found = peers.try_path(target, KEY, 5.0, 0.5)
    end()
    assert (found.reach.outcome, found.stalled) == ("ok", way)


def test_a_connection_that_ends_is_no_stall(route: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    listener, target = route

    def ends(connection: socket.socket) -> Iterator[bytes]:
        while connection.recv(1) == b"p":
            yield peers._TIME.pack(time.time())

    monkeypatch.setattr(peers, "_replies", ends)
    end = peers._serve(listener, 1, KEY)
    found = peers.try_path(target, KEY, 5.0, 5.0)
    end()
    assert (found.reach.outcome, found.stalled) == ("error", "")
    assert found.reach.detail


def replies(connection: socket.socket, way: str) -> Iterator[bytes]:
    """Answer pings; lose what is long in one direction."""
    while request := connection.recv(1):
        if request == b"p":
            yield peers._TIME.pack(time.time())
        elif way == "back":
            peers.handshake.read_exactly(connection, peers._BULK_BYTES)
            yield b"k"


def test_a_clock_that_is_ahead_is_measured(route: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    listener, way = route

    made = peers._replies

    def ahead(connection: socket.socket) -> Iterator[bytes]:
        for reply in made(connection):
            is_time = len(reply) == peers._TIME.size
            yield peers._TIME.pack(time.time() + 7.0) if is_time else reply

    monkeypatch.setattr(peers, "_replies", ahead)
    end = peers._serve(listener, 1, KEY)
    found = peers.try_path(way, KEY, 5.0, 5.0)
    end()
    assert found.clock_s == pytest.approx(7.0, abs=max(0.01, found.round_trip_s))


def test_strangers_that_hold_all_slots_make_the_check_fail_and_end_nothing(
    route: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener, way = route
    monkeypatch.setattr(peers, "_MAX_SERVED", 1)
    end = peers._serve(listener, 1, KEY)
    with socket.create_connection(listener.getsockname()) as stranger:
        assert stranger.recv(8) == b"wingbeat"
        assert peers.try_path(way, KEY, 5.0, 5.0).reach.outcome == "handshake"
    await_answer(way)
    end()


def test_a_lack_of_descriptors_does_not_end_the_service(route: Any) -> None:
    listener, way = route

    class Short:
        """A listener whose process has no descriptor left at first."""

        failures = 3

        def accept(self) -> Any:
            if self.failures:
                self.failures -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return listener.accept()

        def shutdown(self, how: int) -> None:
            listener.shutdown(how)

    end = peers._serve(Short(), 1, KEY)  # type: ignore[arg-type]
    assert peers.try_path(way, KEY, 5.0, 5.0).reach.outcome == "ok"
    end()


def test_a_stranger_gets_no_answer_and_ends_no_connection(route: Any) -> None:
    listener, way = route
    end = peers._serve(listener, 1, KEY)
    with socket.create_connection(listener.getsockname()) as stranger:
        stranger.sendall(bytes(200))
        found = peers.try_path(way, KEY, 5.0, 5.0)
        stranger.settimeout(5.0)
        assert stranger.recv(8) == b"wingbeat"
        with suppress(ConnectionResetError):  # more was sent than is read
            while stranger.recv(100):
                pass  # the rest of the challenge, then the end
    end()
    assert found.reach.outcome == "ok"


# -- opening a connection


def test_reach_waits_for_a_server_that_starts_later() -> None:
    port = free_port()
    made: list[socket.socket] = []
    timer = threading.Timer(0.5, lambda: made.append(socket.create_server(("127.0.0.1", port))))
    timer.start()
    found = reach("127.0.0.1", port, time.monotonic() + 30.0)
    timer.join()
    made[0].close()
    assert found.outcome == "ok"
    assert found.own == "127.0.0.1"


def test_a_name_that_does_not_exist_is_reported() -> None:
    found = reach("no-such-host.invalid", 1, time.monotonic() + 0.5)
    assert found.outcome == "name"
    assert "no-such-host.invalid cannot be resolved" in found.detail


def test_facts_of_the_helper_are_complete() -> None:
    assert set(GOOD) < set(Facts.__dataclass_fields__)
