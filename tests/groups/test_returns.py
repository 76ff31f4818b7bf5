"""How who was started again and the group generator find each other."""

from __future__ import annotations

import json
import secrets
import threading
import time

import pytest

from wingbeat.errors import RendezvousError
from wingbeat.groups.returns import Back, Returns, announce, life_of, say_over
from wingbeat.transport import interfaces as nic
from wingbeat.transport.loopback import Switchboard
from wingbeat.transport.messages.peers import PeerInfo

ROOM = "groups1"


def card() -> str:
    host = nic.local()
    uses = (host.interfaces[0].address,)
    ends = (("tcp://127.0.0.1:5",),)
    return PeerInfo(host, uses, secrets.randbits(64), "", ends, 1000, 2000).to_json()


def comes_back(store: Switchboard, returns: Returns, worker: int) -> int:
    """Come back as a worker; which life it has."""
    life = life_of(store, ROOM, worker)
    store.set(f"messages/{ROOM}/{worker}.{life}", card())
    thread = threading.Thread(target=announce, args=(store, ROOM, worker, life, 30.0))
    thread.start()
    back = None
    while back is None:
        returns.look()
        back = returns.news()
    assert back[:2] == (worker, life)
    assert thread.is_alive(), "it is not connected yet"
    returns.met(back)
    returns.look()
    thread.join(30.0)
    assert not thread.is_alive()
    return life


def test_each_life_has_a_number_and_is_heard_of_once() -> None:
    store = Switchboard()
    returns = Returns(store, ROOM, 4)
    assert [comes_back(store, returns, worker) for worker in (2, 3, 2, 2)] == [1, 1, 2, 3]
    returns.look()
    assert returns.news() is None


def test_who_comes_back_hears_that_there_is_no_generator_any_more() -> None:
    store = Switchboard()
    say_over(store, ROOM)
    with pytest.raises(RendezvousError, match=r"rank 2: cannot come back: .* has died"):
        announce(store, ROOM, 2, 1, 30.0)


@pytest.mark.parametrize("session", ["Infinity", "1e400", "-1", "true", '"1"', "1.5"])
def test_malformed_card_is_refused_and_the_next_worker_comes_back(
    session: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = Switchboard()
    returns = Returns(store, ROOM, 4)
    store.set(f"{ROOM}/back/0", "[1, 1]")
    fields = json.loads(card())
    text = json.dumps(fields | {"session": "SESSION"}).replace('"SESSION"', session)
    store.set(f"messages/{ROOM}/1.1", text)
    returns.look()
    assert returns.news() is None
    refused = f"rank 1 comes back, and is refused: the rendezvous store has under 'messages/{ROOM}"
    assert caplog.text.count(refused) == 1
    assert comes_back(store, returns, 2) == 1


def test_worker_whose_card_a_slow_store_did_not_return_in_time_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Switchboard()
    returns = Returns(store, ROOM, 4)
    store.set(f"{ROOM}/back/0", "[1, 1]")
    monkeypatch.setattr("wingbeat.groups.returns._READ_S", 0.0)
    with pytest.raises(TimeoutError):
        returns.look()  # its card is not there yet
    assert returns.news() is None
    store.set(f"messages/{ROOM}/1.1", card())
    returns.look()
    back = returns.news()
    assert back is not None
    assert back[:2] == (1, 1)


def test_worker_that_goes_on_without_a_generator_ends_it() -> None:
    store = Switchboard()
    returns = Returns(store, ROOM, 4)
    returns.look()
    assert not returns.over
    say_over(store, ROOM)
    returns.look()
    assert returns.over


def test_a_generator_that_does_not_answer_is_said() -> None:
    with pytest.raises(RendezvousError, match=r"did not answer within 0\.1 s; check that rank 0"):
        announce(Switchboard(), ROOM, 2, 1, 0.1)


def test_thread_that_fails_is_raised_where_its_news_are_read() -> None:
    store = Switchboard()

    def broken(_key: str) -> bool:
        raise KeyError("torn")

    store.has = broken  # type: ignore[method-assign]
    returns = Returns(store, ROOM, 4)
    returns.start()
    with pytest.raises(RendezvousError, match="thread wingbeat-returns has ended by KeyError"):
        next_of(returns)


def next_of(returns: Returns) -> Back:
    """Wait for the next that has come back."""
    deadline = time.monotonic() + 30.0
    while (back := returns.news()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return back


def test_lines_that_nobody_of_this_job_has_written_are_passed_over() -> None:
    store = Switchboard()
    lines = ("{", "[1, 0]", "[-1, 1]", '["1", 1]', "[9, 1]", "[3, 1]", "[1, 1]")
    for number, text in enumerate(lines):
        store.set(f"{ROOM}/back/{number}", text)
    store.set(f"messages/{ROOM}/3.1", "no card")
    store.set(f"messages/{ROOM}/1.1", card())
    returns = Returns(store, ROOM, 4)
    returns.look()
    back = returns.news()
    assert back is not None
    assert back[:2] == (1, 1)
    assert returns.news() is None
