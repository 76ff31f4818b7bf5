"""Flows under faults, in virtual time: each message arrives once and in order, or it is said."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.amounts import examples
from helpers.headers import Type
from helpers.lossy_network import Faults
from helpers.mail import Play
from wingbeat._native import Endpoint, Header
from wingbeat.errors import UsageError
from wingbeat.transport.messages.frames import Limits
from wingbeat.transport.messages.peers import Route, Routes

FAULTS = st.builds(
    Faults,
    drop=st.sampled_from([0.0, 0.1, 0.4]),
    repeat=st.sampled_from([0.0, 0.2]),
    delay=st.sampled_from([0.0, 0.01, 1.0]),
    reorder=st.booleans(),
)
PATIENT = Limits(silence=1e6)


def payload_of(number: int) -> bytes:
    """Small and large ones, each different."""
    return bytes([number % 251]) * (number * 977 % 3000)


def stream(seed: int, faults: Faults, count: int = 12) -> Play:
    """Post messages at random times, take them at random times, until all is quiet."""
    chance = random.Random(seed)
    play = Play(2, faults, seed, PATIENT)
    posted, got = [], []
    while len(got) < count:
        for _ in range(chance.randrange(4)):
            if len(posted) < count:
                number = len(posted)
                posted.append(play.post(0, 1, number, payload_of(number)))
        quiet = not play.step()
        if quiet or chance.random() < 0.5:
            taken = play.take(1)
            assert taken or not quiet or len(posted) < count, "messages were lost in silence"
            got += taken
    assert [(m.kind, bytes(m.payload)) for m in got] == [(n, payload_of(n)) for n in range(count)]
    while not all(each.done() for each in posted):
        assert play.step(), "the sender never heard that all has arrived"
    return play


def requests(seed: int, faults: Faults, count: int = 6) -> Play:
    """Two ask a third, one request at a time each; every request is answered once."""
    play = Play(3, faults, seed, PATIENT)
    asked, answered = {0: 0, 1: 0}, {0: 0, 1: 0}
    for asker in asked:
        play.post(asker, 2, 0)
    handled = []
    while min(answered.values()) < count:
        assert play.step(), "an answer was lost in silence"
        for request in play.take(2):
            handled.append((request.peer, request.kind))
            play.post(2, request.peer, request.kind)
        for asker in asked:
            for answer in play.take(asker):
                assert answer.kind == asked[asker]
                answered[asker] += 1
                asked[asker] += 1
                if asked[asker] < count:
                    play.post(asker, 2, asked[asker])
    assert sorted(handled) == [(asker, n) for asker in (0, 1) for n in range(count)]
    return play


def faults_of(seed: int) -> Faults:
    """Every combination in turn."""
    return Faults(
        drop=(0.0, 0.1, 0.3)[seed % 3],
        repeat=(0.0, 0.2)[seed // 3 % 2],
        delay=(0.0, 0.01, 0.5)[seed // 6 % 3],
        reorder=bool(seed // 18 % 2),
    )


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(0, 2**32), FAULTS)
def test_a_stream_arrives_once_and_in_order(seed: int, faults: Faults) -> None:
    stream(seed, faults)


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(0, 2**32), FAULTS)
def test_every_request_is_answered_once(seed: int, faults: Faults) -> None:
    requests(seed, faults)


@pytest.mark.slow
@pytest.mark.parametrize("quarter", range(4))
def test_ten_thousand_random_runs_deliver_everything_once(quarter: int) -> None:
    """A quarter of them: 2,500 streams, and as many times requests and answers."""
    for seed in range(2500 * quarter, 2500 * (quarter + 1)):
        stream(seed, faults_of(seed))
        requests(seed, faults_of(seed))


def test_faultless_network_needs_no_retransmission() -> None:
    play = stream(1, Faults())
    assert all(end.repeated == 0 for end in play.ends)
    assert not any(end.refused for end in play.ends)


@pytest.mark.parametrize("seed", range(20))
def test_slow_connection_needs_no_retransmission(seed: int) -> None:
    """Messages both ways, each under way for longer than a sender waits before it asks."""
    play = Play(2, Faults(delay=5.0), seed, PATIENT)
    while not all(end.has_met for end in play.ends) or play.network.next_at() is not None:
        play.step()
    for number in range(200):
        play.step()
        for source in (0, 1):
            play.post(source, 1 - source, number, payload_of(number))
    while any(end.room(1 - n, 0, 0) < PATIENT.window for n, end in enumerate(play.ends)):
        assert play.step()
        assert play.take(0) is not None
        assert play.take(1) is not None
    assert all(end.repeated == 0 for end in play.ends)


def test_repeated_hello_on_one_connection_causes_no_retransmission() -> None:
    play = Play(limits=PATIENT)
    while not all(end.has_met for end in play.ends) or play.network.next_at() is not None:
        play.step()
    play.post(1, 0, 7)  # on its way when the other introduces itself once more
    play.ends[0].connected(1, 0, 0, True, play.clock.now)
    play.exchange()
    for _ in range(6):
        play.step()
    assert [m.kind for m in play.take(0)] == [7]
    assert all(end.repeated == 0 for end in play.ends)


def test_interrupted_connection_loses_nothing() -> None:
    """What was under way when the connection broke is sent again when it stands."""
    play = Play(limits=PATIENT)
    for _ in range(6):
        play.step()
    play.network.cut_off(0, 1)
    posted = [play.post(0, 1, n) for n in range(5)]
    for _ in range(20):
        play.step()
    assert not play.take(1)
    play.network.join(0, 1)
    while not all(each.done() for each in posted):
        assert play.step()
    assert [m.kind for m in play.take(1)] == list(range(5))


def test_a_silent_peer_is_lost_and_the_report_counts() -> None:
    play = Play(3, limits=Limits(silence=30.0))
    for _ in range(6):
        play.step()
    play.network.cut_off(0, 1)
    play.post(0, 1, 1, b"abc")
    play.post(0, 2, 2)
    while play.step():
        pass
    assert 30.0 <= play.clock.now <= 33.0
    assert play.ends[0].lost == {1: (0, 1, 79)}, "interface, messages, bytes"
    assert [m.kind for m in play.take(2)] == [2], "the other peer goes on"


def test_lost_peer_that_sends_again_receives_what_waited() -> None:
    play = Play(2, limits=Limits(silence=30.0))
    for _ in range(6):
        play.step()
    play.network.cut_off(0, 1)
    play.post(0, 1, 1)
    while play.step():
        pass
    assert set(play.ends[0].lost) == {1}
    play.network.join(0, 1)
    play.post(1, 0, 7)
    got: list[int] = []
    while play.step():
        got += [m.kind for m in play.take(1)]
    assert not play.ends[0].lost
    assert [m.kind for m in play.take(0)] == [7]
    assert got == [1]


def test_slow_peer_is_not_lost() -> None:
    play = Play(limits=Limits(silence=1.0))
    play.post(0, 1, 1)
    for _ in range(50):
        play.step()
    play.clock.now += 100.0
    for _ in range(50):
        play.step()
    assert not play.ends[0].lost
    assert [m.kind for m in play.take(1)] == [1]


def test_the_urgent_are_taken_first() -> None:
    play = Play(classes=2)
    for kind, urgency in ((1, 1), (2, 1), (3, 0)):
        play.post(0, 1, kind, urgency=urgency)
    for _ in range(10):
        play.step()
    assert [m.kind for m in play.take(1)] == [3, 1, 2]


def frame(**fields: object) -> Header:
    """A data frame of process 0 for process 1, as `Play` numbers them."""
    return Header(
        **{"type": Type.DATA, "session": 1000, "sender": 0, "receiver": 1, "sequence": 1, **fields}
    )


def met(size: int = 2) -> Play:
    play = Play(size)
    for _ in range(6):
        play.step()
    return play


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (frame(receiver=7), "address"),
        (frame(sender=7), "address"),
        (frame(sender=2, session=1002), "address"),
        (frame(session=1), "session"),
        (frame(arrived=1), "sequence"),
        (frame(taken=1), "sequence"),
        (frame(type=Type.HELLO, sequence=0), "replayed"),
        (frame(length=2**32 - 1), "window"),
    ],
)
def test_frames_of_strangers_are_refused_and_counted(header: Header, reason: str) -> None:
    play = met(3)
    end = play.ends[1]
    end.accept(0, 0, 0, header, b"", play.clock.now)
    assert end.refused == {reason: 1}
    assert not play.take(1)
    end.accept(0, 0, 0, frame(), b"", play.clock.now)
    assert len(play.take(1)) == 1, "the flow goes on as if nothing had come"


def test_a_replayed_frame_is_dropped() -> None:
    play = met()
    end = play.ends[1]
    for _ in range(3):
        end.accept(0, 0, 0, frame(), b"", play.clock.now)
    assert len(play.take(1)) == 1
    assert end.repeated == 2


def test_kept_message_counts_against_the_window_until_freed() -> None:
    play = Play(limits=Limits(message=800, window=6000))
    whole = room(play)
    for number in range(3):
        play.post(0, 1, number, bytes(800))
    settle(play)
    first, second = (play.ends[1].take(play.clock.now, keep=True) for _ in range(2))
    third = play.ends[1].take(play.clock.now)
    assert first is not None
    assert second is not None
    assert third is not None
    settle(play)
    assert whole - room(play) == first.size + second.size
    for each in (second, second, third):  # in any order, and once
        play.ends[1].free(each, play.clock.now)
    settle(play)
    assert whole - room(play) == first.size
    play.ends[1].free(first, play.clock.now)
    settle(play)
    assert room(play) == whole


def room(play: Play) -> int:
    return play.ends[0].room(1, 0, 0)


def settle(play: Play) -> None:
    """Let everything arrive, and the news of it."""
    for _ in range(30):
        play.step()


def test_message_beyond_the_window_is_dropped() -> None:
    """A member that ignores the limit cannot fill this one's memory."""
    play = Play(limits=Limits(message=800, window=6000))
    for _ in range(6):
        play.step()
    end, now = play.ends[1], play.clock.now
    for number in range(1, 50):
        end.accept(0, 0, 0, frame(sequence=number, length=800), b"", now)
    assert sum(m.size for m in play.take(1)) <= 6000
    assert end.refused["window"] == 1, "it is the first that is missing"
    for number in range(7, 12):
        end.accept(0, 0, 0, frame(sequence=number, length=800), b"", now)
    assert end.refused["window"] == 1


def test_post_beyond_the_window_is_refused() -> None:
    play = Play(limits=Limits(message=800, window=6000))
    posts = [play.ends[0].post(1, 0, 0, 1, 800, (0, 0, 0, 0), 0, 0.0) for _ in range(8)]
    assert [post is not None for post in posts] == 6 * [True] + 2 * [False]


def test_lost_hello_is_repeated() -> None:
    play = Play()
    play.network.cut_off(0, 1)
    for _ in range(5):
        play.step()
    play.network.join(0, 1)
    while not all(end.has_met for end in play.ends):
        assert play.step()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"message": 0}, r"message=0\); allowed: 1 to"),
        ({"message": 1000, "window": 5000}, r"window=5000\); allowed: 4156 bytes and more above"),
        ({"silence": 0}, r"silence=0\); allowed"),
    ],
)
def test_invalid_limits_are_refused(values: dict, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Limits(**values)


def test_removed_peer_leaves_no_state_and_may_rejoin() -> None:
    play = Play(3)
    while play.step():
        pass
    end = play.ends[0]
    for sender in (1, 2):
        play.post(sender, 0, sender)
    while end.waiting != 2:
        assert play.step()
    leave(play, 1)
    assert end.left == {1}
    end.remove_peer(1)
    assert end.waiting == 1
    assert not end.left
    assert [each.peer for each in play.take(0)] == [2]
    end.add(1, 0, 0, 77)
    assert not end.has_met


def leave(play: Play, number: int) -> None:
    """Have process 0 receive the last message of another one."""
    last = Header(Type.LEAVE, 1000 + number, number, 0, sequence=2)
    play.ends[0].accept(number, 0, 0, last, b"", play.clock.now)


def test_peer_that_left_and_disconnected_has_no_timer() -> None:
    """Else whoever waits until something is due does not wait at all."""
    play = Play(2)
    while play.step():
        pass
    end, now = play.ends[0], play.clock.now
    play.post(1, 0, 1)
    while not end.waiting:
        assert play.step()
    leave(play, 1)
    end.tick(now + 1e6)
    assert end.busy, "it is told what has arrived"
    end.disconnected(1, 0, 0, now + 1e6)
    end.tick(now + 2e6)
    assert end.due == float("inf")
    assert end.unconnected(now + 2e6) == {}, "it has left"


def test_peer_without_any_connection_is_unconnected() -> None:
    end = Endpoint(0, 1, 1 << 20, 300.0)
    routes = [
        (peer, interface, urgency) for peer in (1, 2) for interface in (0, 1) for urgency in (0, 1)
    ]
    for route in routes:
        end.add(*route, 7)
        end.connected(*route, True, 0.0)
    for now, route in enumerate(routes[:4]):
        assert end.unconnected(9.0) == {}
        end.disconnected(*route, float(now))
    assert end.unconnected(4.0) == {1: 1.0}
    end.disconnected(*routes[0], 8.0)
    assert end.unconnected(9.0) == {1: 6.0}, "it was lost before"
    end.connected(*routes[1], True, 9.0)
    assert end.unconnected(9.0) == {}, "it has made one of them anew"


@pytest.mark.parametrize("silence", [5.0, float("inf")])
def test_endpoint_that_tolerates_silence_loses_no_peer(silence: float) -> None:
    end = Endpoint(0, 1, 1 << 20, silence)
    end.add(1, 0, 0, 2)
    end.connected(1, 0, 0, True, 0.0)
    assert end.post(1, 0, 0, 1, 0, (0, 0, 0, 0), 0, 0.0) is not None
    end.tick(100.0)
    assert set(end.lost) == ({1} if silence == 5.0 else set())


def test_silence_before_resume_does_not_count() -> None:
    end = Endpoint(0, 1, 1 << 20, 60.0)
    end.add(1, 0, 0, 2)
    end.connected(1, 0, 0, True, 0.0)
    end.post(1, 0, 0, 1, 0, (0, 0, 0, 0), 0, 0.0)
    end.tick(59.0)
    end.resume(1000.0)
    end.tick(1059.0)
    assert not end.lost
    end.tick(1060.0)
    assert set(end.lost) == {1}


def test_interfaces_of_a_peer_are_stored_until_routes_change() -> None:
    """Servers request them twice for each message."""
    routes = Routes(0, "rank {}".format)
    routes.set(1, [Route(1, 2, 0), Route(1, 0, 0), Route(1, 2, 1)])
    assert routes.interfaces(1) == (2, 0)
    assert routes.interfaces(1) is routes.interfaces(1)
    routes.set(1, [Route(1, 0, 0)])
    routes.set(2, [Route(2, 2, 0)])
    assert (routes.interfaces(1), routes.interfaces(2)) == ((0,), (2,))
    with pytest.raises(
        UsageError, match=r"rank 0 has no connection to rank 3; allowed: rank 1, rank 2"
    ):
        routes.interfaces(3)
