"""Flows under faults, in virtual time: each message arrives once and in order, or it is said."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.amounts import examples
from helpers.lossy_network import Faults
from helpers.mail import Play, message
from wingbeat.errors import UsageError
from wingbeat.transport.messages.endpoint import (
    MAX_INLINE_BYTES,
    Endpoint,
    Limits,
    Membership,
    Route,
)
from wingbeat.transport.messages.frames import Arrival, ConnectionId, Header, Type
from wingbeat.transport.messages.mailbox import Routes

FAULTS = st.builds(
    Faults,
    drop=st.sampled_from([0.0, 0.1, 0.4]),
    repeat=st.sampled_from([0.0, 0.2]),
    cut=st.sampled_from([0.0, 0.1]),
    delay=st.sampled_from([0.0, 0.01, 1.0]),
    reorder=st.booleans(),
)
PATIENT = Limits(silence=1e6)


def payload_of(number: int) -> bytes:
    """Small and large ones, each different."""
    return bytes([number % 251]) * (number * 977 % (2 * MAX_INLINE_BYTES))


def stream(seed: int, faults: Faults, count: int = 12) -> Play:
    """Post messages at random times, take them at random times, until all is quiet."""
    chance = random.Random(seed)
    play = Play(2, faults, seed, PATIENT)
    posted, got = [], []
    while len(got) < count:
        for _ in range(chance.randrange(4)):
            if len(posted) < count:
                number = len(posted)
                posted.append(play.post(0, 1, message(number, payload_of(number))))
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
        play.post(asker, 2, message(0))
    handled = []
    while min(answered.values()) < count:
        assert play.step(), "an answer was lost in silence"
        for request in play.take(2):
            handled.append((request.peer, request.kind))
            play.post(2, request.peer, message(request.kind))
        for asker in asked:
            for answer in play.take(asker):
                assert answer.kind == asked[asker]
                answered[asker] += 1
                asked[asker] += 1
                if asked[asker] < count:
                    play.post(asker, 2, message(asked[asker]))
    assert sorted(handled) == [(asker, n) for asker in (0, 1) for n in range(count)]
    return play


def faults_of(seed: int) -> Faults:
    """Every combination in turn."""
    return Faults(
        drop=(0.0, 0.1, 0.3)[seed % 3],
        repeat=(0.0, 0.2)[seed // 3 % 2],
        cut=(0.0, 0.1)[seed // 6 % 2],
        delay=(0.0, 0.01, 0.5)[seed // 12 % 3],
        reorder=bool(seed // 36 % 2),
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
    assert all(flow.repeated == 0 for end in play.ends for flow in end.flows.values())
    assert not any(end.refused for end in play.ends)


@pytest.mark.parametrize("seed", range(20))
def test_slow_connection_needs_no_retransmission(seed: int) -> None:
    """Messages both ways, each under way for longer than a sender waits before it asks."""
    play = Play(2, Faults(delay=5.0), seed, PATIENT)
    while any(end.unheard for end in play.ends) or play.network.next_at() is not None:
        play.step()
    for number in range(200):
        play.step()
        for source in (0, 1):
            play.post(source, 1 - source, message(number, payload_of(number)))
    while any(flow.waiting_bytes for end in play.ends for flow in end.flows.values()):
        assert play.step()
        assert play.take(0) is not None
        assert play.take(1) is not None
    assert all(flow.repeated == 0 for end in play.ends for flow in end.flows.values())


def test_repeated_hello_on_one_connection_causes_no_retransmission() -> None:
    play = Play(limits=PATIENT)
    while any(end.unheard for end in play.ends) or play.network.next_at() is not None:
        play.step()
    play.post(1, 0, message(7))  # on its way when the other introduces itself once more
    play.ends[0]._send_hello(Route(1, 0, 0), play.clock.now)
    play.ends[0].flush(play.carriers[0].send, play.clock.now)
    play._exchange(play.ends[1], play.carriers[1])
    for _ in range(6):
        play.step()
    assert [m.kind for m in play.take(0)] == [7]
    assert all(flow.repeated == 0 for end in play.ends for flow in end.flows.values())


def test_interrupted_connection_loses_nothing() -> None:
    """What was under way when the connection broke is sent again when it stands."""
    play = Play(limits=PATIENT)
    for _ in range(6):
        play.step()
    play.network.cut_off(0, 1)
    posted = [play.post(0, 1, message(n)) for n in range(5)]
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
    play.post(0, 1, message(1, b"abc"))
    play.post(0, 2, message(2))
    while play.step():
        pass
    assert 30.0 <= play.clock.now <= 33.0
    assert play.ends[0].lost == {
        1: "has been silent for 30 s; 1 messages to it (79 bytes) may not have arrived"
    }
    assert [m.kind for m in play.take(2)] == [2], "the other peer goes on"


def test_lost_peer_that_sends_again_receives_what_waited() -> None:
    play = Play(2, limits=Limits(silence=30.0))
    for _ in range(6):
        play.step()
    play.network.cut_off(0, 1)
    play.post(0, 1, message(1))
    while play.step():
        pass
    assert set(play.ends[0].lost) == {1}
    play.network.join(0, 1)
    play.post(1, 0, message(7))
    got: list[int] = []
    while play.step():
        got += [m.kind for m in play.take(1)]
    assert not play.ends[0].lost
    assert [m.kind for m in play.take(0)] == [7]
    assert got == [1]


def test_slow_peer_is_not_lost() -> None:
    play = Play(limits=Limits(silence=1.0))
    play.post(0, 1, message(1))
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
        play.post(0, 1, message(kind), urgency)
    for _ in range(10):
        play.step()
    assert [m.kind for m in play.take(1)] == [3, 1, 2]


def frame(**fields: object) -> Header:
    """A data frame of process 0 for process 1, as `Play` numbers them."""
    return Header(
        **{"type": Type.DATA, "session": 1000, "sender": 0, "receiver": 1, "sequence": 1, **fields}
    )


def met() -> Play:
    play = Play()
    for _ in range(6):
        play.step()
    return play


@pytest.mark.parametrize(
    ("header", "extra", "reason"),
    [
        (frame(receiver=7), {}, "address"),
        (frame(sender=7), {}, "address"),
        (frame(session=1), {}, "session"),
        (frame(sender=2, session=1002), {}, "key"),
        (frame(length=5), {}, "length"),
        (frame(length=2**32 - 1), {}, "length"),
        (frame(arrived=1), {}, "sequence"),
        (frame(taken=1), {}, "sequence"),
        (frame(), {"whole": False}, "parts"),
        (frame(), {"place": 9}, "stranger"),
    ],
)
def test_frames_of_strangers_are_refused_and_counted(
    header: Header, extra: dict, reason: str
) -> None:
    play = met() if header.sender != 2 else Play(3)
    for _ in range(6):
        play.step()
    end = play.ends[1]
    known = next(place for route, place in end._place.items() if route.peer == 0)
    place = known if "place" not in extra else known._replace(name="elsewhere")
    arrival = Arrival(place, header.pack(), None, 0, extra.get("whole", True))
    end.accept(arrival, play.clock.now)
    assert end.refused == {reason: 1}
    assert not play.take(1)
    end.accept(Arrival(known, frame().pack(), None, 0), play.clock.now)
    assert len(play.take(1)) == 1, "the flow goes on as if nothing had come"


def test_a_replayed_frame_is_dropped() -> None:
    play = met()
    end = play.ends[1]
    known = next(iter(end._place.values()))
    for _ in range(3):
        end.accept(Arrival(known, frame().pack(), None, 0), play.clock.now)
    assert len(play.take(1)) == 1
    assert end.flows[Route(0, 0, 0)].repeated == 2


def test_kept_message_counts_against_the_window_until_freed() -> None:
    play = Play(limits=Limits(message=800, window=6000))
    flow = play.ends[0].flows[Route(1, 0, 0)]
    whole = flow.room
    for number in range(3):
        play.post(0, 1, message(number, bytes(800)))
    settle(play)
    first, second = (play.ends[1].take(play.clock.now, keep=True) for _ in range(2))
    third = play.ends[1].take(play.clock.now)
    assert first is not None
    assert second is not None
    assert third is not None
    settle(play)
    assert whole - flow.room == first.size + second.size
    for each in (second, second, third):  # in any order, and once
        play.ends[1].free(each, play.clock.now)
    settle(play)
    assert whole - flow.room == first.size
    play.ends[1].free(first, play.clock.now)
    settle(play)
    assert flow.room == whole


def settle(play: Play) -> None:
    """Let everything arrive, and the news of it."""
    for _ in range(30):
        play.step()


def test_message_beyond_the_window_is_dropped() -> None:
    """A member that ignores the limit cannot fill this one's memory."""
    play = Play(limits=Limits(message=800, window=6000))
    for _ in range(6):
        play.step()
    for number in range(50):
        play.post(0, 1, message(number, bytes(800)))
    for _ in range(50):
        play.step()
    assert sum(m.size for m in play.ends[1]._inbox[0]) <= 6000
    assert play.ends[1].refused["window"]
    got = []
    while len(got) < 50:
        assert play.step()
        got += play.take(1)
    assert [m.kind for m in got] == list(range(50))


def test_old_hello_binds_no_connection() -> None:
    """Who plays a member's hello again from a connection of its own does not become that member."""
    play = met()
    end = play.ends[1]
    known = next(iter(end._place.values()))
    hello = Header(Type.HELLO, 1000, 0, 1, sequence=1)
    end.accept(Arrival(known._replace(name="elsewhere"), hello.pack(), None, 0), play.clock.now)
    assert end.refused == {"replayed": 1}
    assert end._place == {Route(0, 0, 0): known}


def test_a_member_cannot_introduce_itself_as_another() -> None:
    """Its own key was proved for the connection, and the hello in it names somebody else."""
    play = Play(3)
    for _ in range(6):
        play.step()
    end = play.ends[1]
    places = dict(end._place)
    place = places[Route(0, 0, 0)]._replace(name="elsewhere")
    end.accept(Arrival(place, Header(Type.HELLO, 1000, 0, 1, 9).pack(), None, 2), play.clock.now)
    assert end.refused == {"key": 1}
    assert end._place == places


def test_lost_hello_is_repeated() -> None:
    play = Play()
    play.network.cut_off(0, 1)
    for _ in range(5):
        play.step()
    play.network.join(0, 1)
    while any(end.unheard for end in play.ends):
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
        play.post(sender, 0, message(sender))
    while end.waiting != 2:
        assert play.step()
    end.left.add(1)
    end.remove_peer(1)
    assert end.waiting == 1
    assert {route.peer for route in end.flows} == {2}
    assert not end.left
    assert [each.peer for each in play.take(0)] == [2]
    end.add_peer(1, 77)
    end.add(Route(1, 0, 0), None, play.clock.now)
    assert end.unheard == [Route(1, 0, 0)]


def test_peer_that_left_and_disconnected_has_no_timer() -> None:
    """Else whoever waits until something is due does not wait at all."""
    play = Play(2)
    while play.step():
        pass
    end, now = play.ends[1], play.clock.now
    play.post(0, 1, message(1))
    while not end.waiting:
        assert play.step()
    end.left.add(0)
    end.tick(now + 1e6)
    assert end.busy, "it is told what has arrived"
    end.post(Route(0, 0, 0), message(2), lambda *_: False, now + 1e6)
    assert 0 in {route.peer for route in end.down}
    end.tick(now + 2e6)
    assert end.due() == float("inf")


def test_peer_without_any_connection_is_unconnected() -> None:
    end, cut = Endpoint(Membership(0, 1, {1: 2, 2: 3}), Limits()), set[ConnectionId]()
    routes = [Route(*each) for each in itertools.product((1, 2), (0, 1), (0, 1))]
    places = {
        each: ConnectionId(each.interface, each.urgency, b"%d" % each.peer) for each in routes
    }
    for route, place in places.items():
        end.add(route, place, 0.0)
    for now, place in enumerate(place for route, place in places.items() if route.peer == 1):
        end.check_connections(cut.__contains__, float(now))
        assert end.unconnected(9.0) == {}
        cut.add(place)
    end.check_connections(cut.__contains__, 4.0)
    assert end.unconnected(4.0) == {1: 0.0}
    assert end.unconnected(9.0) == {1: 5.0}
    cut.discard(places[Route(1, 1, 0)])
    end.check_connections(cut.__contains__, 9.0)
    assert end.unconnected(9.0) == {}, "it has made one of them anew"
    end.check_connections(set(places.values()).__contains__, 10.0)
    end.left.add(2)
    assert end.unconnected(11.0) == {1: 1.0}


@pytest.mark.parametrize("tolerate_silence", [False, True])
def test_endpoint_that_tolerates_silence_loses_no_peer(tolerate_silence: bool) -> None:
    limits = Limits(silence=5.0)
    end = Endpoint(Membership(0, 1, {1: 2}), limits, tolerate_silence=tolerate_silence)
    end.add(Route(1, 0, 0), ConnectionId(0, 0, "there"), 0.0)
    end.post(Route(1, 0, 0), message(1), lambda *_: True, 0.0)
    end.tick(100.0)
    assert set(end.lost) == (set() if tolerate_silence else {1})


def test_interfaces_of_a_peer_are_stored_until_routes_change() -> None:
    """Servers request them twice for each message."""
    routes = Routes([Route(1, 2, 0), Route(1, 0, 0), Route(1, 2, 1)], 0, "rank {}".format)
    assert routes.interfaces(1) == (2, 0)
    assert routes.interfaces(1) is routes.interfaces(1)
    routes.renew([Route(1, 0, 0), Route(2, 2, 0)])
    assert (routes.interfaces(1), routes.interfaces(2)) == ((0,), (2,))
    with pytest.raises(
        UsageError, match=r"rank 0 has no connection to rank 3; allowed: rank 1, rank 2"
    ):
        routes.interfaces(3)
