"""How a restarted worker and the group generator find each other."""

from __future__ import annotations

import json
import secrets
import threading
import time

import pytest

from wingbeat.errors import RendezvousError
from wingbeat.methods.model_averaging.client import StatusTable
from wingbeat.methods.model_averaging.service import (
    Rejoin,
    RejoinLog,
    announce_rejoin,
    next_incarnation,
)
from wingbeat.transport import interfaces as nic
from wingbeat.transport.loopback import Switchboard
from wingbeat.transport.messages.peers import PeerInfo

ROOM = "groups1"


def card() -> str:
    host = nic.local()
    uses = (host.interfaces[0].address,)
    return PeerInfo(host, uses, secrets.randbits(64), "3", True, ((5,),), 1000, 2000).to_json()


def comes_back(store: Switchboard, log: RejoinLog, worker: int) -> int:
    """Come back as a worker; which incarnation it has."""
    incarnation = next_incarnation(store, ROOM, worker)
    store.set(f"messages/{ROOM}/{worker}.{incarnation}", card())
    thread = threading.Thread(target=announce_rejoin, args=(store, ROOM, worker, incarnation, 30.0))
    thread.start()
    back = None
    while back is None:
        log.poll()
        back = log.next_rejoin()
    assert back[:2] == (worker, incarnation)
    assert thread.is_alive(), "it is not connected yet"
    log.confirm(back)
    log.poll()
    thread.join(30.0)
    assert not thread.is_alive()
    return incarnation


def test_each_incarnation_is_numbered_and_read_once() -> None:
    store = Switchboard()
    log = RejoinLog(store, ROOM, 4)
    assert [comes_back(store, log, worker) for worker in (2, 3, 2, 2)] == [1, 1, 2, 3]
    log.poll()
    assert log.next_rejoin() is None


def test_rejoin_after_the_generator_was_lost_raises() -> None:
    store = Switchboard()
    StatusTable(store, ROOM, 4).mark_fallback(0, 1)
    with pytest.raises(RendezvousError, match=r"rank 2: cannot rejoin: .* has died"):
        announce_rejoin(store, ROOM, 2, 1, 30.0)


@pytest.mark.parametrize("session", ["Infinity", "1e400", "-1", "true", '"1"', "1.5"])
def test_malformed_card_is_refused_and_the_next_worker_rejoins(
    session: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = Switchboard()
    log = RejoinLog(store, ROOM, 4)
    store.set(f"{ROOM}/rejoin/0", "[1, 1]")
    fields = json.loads(card())
    text = json.dumps(fields | {"session": "SESSION"}).replace('"SESSION"', session)
    store.set(f"messages/{ROOM}/1.1", text)
    log.poll()
    assert log.next_rejoin() is None
    refused = f"rank 1 rejoins, and is refused: the rendezvous store has under 'messages/{ROOM}"
    assert caplog.text.count(refused) == 1
    assert comes_back(store, log, 2) == 1


def test_rejoin_is_read_again_after_a_timeout_of_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Switchboard()
    log = RejoinLog(store, ROOM, 4)
    store.set(f"{ROOM}/rejoin/0", "[1, 1]")
    monkeypatch.setattr("wingbeat.methods.model_averaging.service._READ_S", 0.0)
    with pytest.raises(TimeoutError):
        log.poll()  # its card is not there yet
    assert log.next_rejoin() is None
    store.set(f"messages/{ROOM}/1.1", card())
    log.poll()
    back = log.next_rejoin()
    assert back is not None
    assert back[:2] == (1, 1)


def test_fallback_of_a_worker_is_seen_by_the_generator() -> None:
    store = Switchboard()
    log = RejoinLog(store, ROOM, 4)
    log.poll()
    assert not log.generator_lost
    StatusTable(store, ROOM, 4).mark_fallback(0, 1)
    log.poll()
    assert log.generator_lost


def test_rejoin_without_an_answer_of_the_generator_raises() -> None:
    with pytest.raises(RendezvousError, match=r"did not answer within 0\.1 s; check that rank 0"):
        announce_rejoin(Switchboard(), ROOM, 2, 1, 0.1)


def test_failure_of_the_thread_is_raised_by_next_rejoin() -> None:
    store = Switchboard()

    def broken(_key: str) -> bool:
        raise KeyError("torn")

    store.has = broken  # type: ignore[method-assign]
    log = RejoinLog(store, ROOM, 4)
    log.start()
    with pytest.raises(RendezvousError, match="thread wingbeat-rejoin-log has ended by KeyError"):
        next_of(log)


def next_of(log: RejoinLog) -> Rejoin:
    """Wait for the next that has come back."""
    deadline = time.monotonic() + 30.0
    while (back := log.next_rejoin()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return back


def test_malformed_entries_are_ignored() -> None:
    store = Switchboard()
    lines = ("{", "[1, 0]", "[-1, 1]", '["1", 1]', "[9, 1]", "[3, 1]", "[1, 1]")
    for number, text in enumerate(lines):
        store.set(f"{ROOM}/rejoin/{number}", text)
    store.set(f"messages/{ROOM}/3.1", "no card")
    store.set(f"messages/{ROOM}/1.1", card())
    log = RejoinLog(store, ROOM, 4)
    log.poll()
    back = log.next_rejoin()
    assert back is not None
    assert back[:2] == (1, 1)
    assert log.next_rejoin() is None
