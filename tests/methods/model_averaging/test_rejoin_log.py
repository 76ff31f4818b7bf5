"""How a restarted worker and the group generator find each other through the membership log."""

from __future__ import annotations

import json
import secrets
import threading

import pytest

from wingbeat.errors import RendezvousError
from wingbeat.methods.model_averaging.rules import Rules
from wingbeat.methods.model_averaging.service import GeneratorConfig
from wingbeat.methods.model_averaging.static_client import StatusTable
from wingbeat.transport import interfaces as nic
from wingbeat.transport.loopback import Switchboard
from wingbeat.transport.membership import LogEntry, MembershipChange, MembershipClient, View
from wingbeat.transport.messages.peers import PeerInfo

ROOM, GENERATOR = "groups1", 4


def card() -> str:
    host = nic.listening(nic.local(), ["lo"])
    ports = ((5,),) * len(host.interfaces)
    return PeerInfo(host, secrets.randbits(64), "3", True, ports, 1000, 2000).to_json()


def member(store: Switchboard, number: int) -> MembershipClient:
    config = GeneratorConfig(
        room=ROOM, host_of=(0,) * GENERATOR, interfaces=(), timeout=30.0, rules=Rules()
    )
    return config._membership(store, number)


def poll(log: MembershipClient) -> list[MembershipChange]:
    """Do what the generator's thread does, and return the workers that it can connect to."""
    log.synchronize()
    log._read_peer_infos()
    return [change for change in log.take_changes() if change.peer_info is not None]


def rejoin(store: Switchboard, log: MembershipClient, worker: int) -> int:
    """Come back as a worker; which incarnation it has."""
    client = member(store, worker)
    incarnation = client.next_incarnation()
    store.set(f"messages/{ROOM}/{worker}.{incarnation}", card())
    thread = threading.Thread(target=client.announce, args=(incarnation, 30.0, [GENERATOR]))
    thread.start()
    found: list[MembershipChange] = []
    while not found:
        found = poll(log)
    assert [each[:2] for each in found] == [(worker, incarnation)]
    assert thread.is_alive(), "it is not connected yet"
    log.acknowledge(worker, incarnation)
    log.synchronize()
    thread.join(30.0)
    assert not thread.is_alive()
    return incarnation


def test_each_incarnation_is_numbered_and_read_once() -> None:
    store = Switchboard()
    log = member(store, GENERATOR)
    assert [rejoin(store, log, worker) for worker in (2, 3, 2, 2)] == [1, 1, 2, 3]
    assert poll(log) == []


def test_no_generator_acknowledges_after_a_worker_has_fallen_back() -> None:
    store = Switchboard()
    log = member(store, GENERATOR)
    StatusTable(store, ROOM, 4, 0).mark_fallback(0, 1)
    assert member(store, 2).announce(1, 30.0, [GENERATOR]) == {}
    log.synchronize()
    assert log.log.view == (0, 0, 2, 0, 1)


def test_fallback_ends_a_rejoin_that_waits() -> None:
    store = Switchboard()
    client, found = member(store, 2), list[dict[int, int]]()
    thread = threading.Thread(target=lambda: found.append(client.announce(1, 30.0, [GENERATOR])))
    thread.start()
    while not store.has(f"membership/{ROOM}/0"):
        pass
    StatusTable(store, ROOM, 4, 0).mark_fallback(0, 1)
    thread.join(20.0)
    assert found == [{}]


@pytest.mark.parametrize("session", ["Infinity", "1e400", "-1", "true", '"1"', "1.5"])
def test_malformed_card_is_refused_and_the_next_worker_rejoins(
    session: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = Switchboard()
    log = member(store, GENERATOR)
    store.set(f"membership/{ROOM}/0", json.dumps(LogEntry(1, View((0, 2, 0, 0, 0)))))
    fields = json.loads(card())
    text = json.dumps(fields | {"session": "SESSION"}).replace('"SESSION"', session)
    store.set(f"messages/{ROOM}/1.1", text)
    assert poll(log) == []
    refused = f"cannot accept rank 1 again: malformed peer info, 'messages/{ROOM}/1.1'"
    assert caplog.text.count(refused) == 1
    assert rejoin(store, log, 2) == 1


def test_card_is_read_again_after_a_timeout_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Switchboard()
    log = member(store, GENERATOR)
    store.set(f"membership/{ROOM}/0", json.dumps(LogEntry(1, View((0, 2, 0, 0, 0)))))
    monkeypatch.setattr("wingbeat.transport.membership._READ_S", 0.0)
    assert poll(log) == []  # its card is not there yet
    store.set(f"messages/{ROOM}/1.1", card())
    assert [each[:2] for each in poll(log)] == [(1, 1)]


def test_card_of_an_ended_incarnation_is_not_awaited() -> None:
    store = Switchboard()
    log = member(store, GENERATOR)
    for number, own in enumerate((2, 3)):
        entry = LogEntry(1, View((0, own, 0, 0, 0)))
        store.set(f"membership/{ROOM}/{number}", json.dumps(entry))
    assert poll(log) == []
    assert not log._started


def test_rejoin_without_an_answer_of_the_generator_raises() -> None:
    text = r"rank 2: the group generator did not accept .* within 0\.1 s"
    with pytest.raises(RendezvousError, match=text):
        member(Switchboard(), 2).announce(1, 0.1, [GENERATOR])


def test_malformed_entries_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    store = Switchboard()
    good = json.dumps(LogEntry(1, View((0, 2, 0, 0, 0))))
    lines = ("{", "[1, 0]", "[-1, [0, 0, 0, 0, 0]]", "[1, [0, 0]]", '["1", 1]', good)
    for number, text in enumerate(lines):
        store.set(f"membership/{ROOM}/{number}", text)
    store.set(f"messages/{ROOM}/1.1", card())
    assert [each[:2] for each in poll(member(store, GENERATOR))] == [(1, 1)]
    assert caplog.text.count("is ignored") == 5
