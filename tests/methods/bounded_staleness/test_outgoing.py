"""What is said leaves in parts, each life's own, and comes in as it was."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.cards import Cards, star
from helpers.one_lane import OneLane
from wingbeat.exchanges.lanes.lanes import BEGIN, MORE
from wingbeat.methods.bounded_staleness.incoming import Incoming
from wingbeat.methods.bounded_staleness.letters import Letter, Malformed, letter_of
from wingbeat.methods.bounded_staleness.messages import Message, Piece, Post, Pull, Report
from wingbeat.methods.bounded_staleness.outgoing import Outgoing, _Waiting
from wingbeat.methods.bounded_staleness.pace import Pace
from wingbeat.methods.bounded_staleness.view import whole
from wingbeat.methods.bounded_staleness.worker import Worker


def letter(life: int, said: bytes, nbytes: int = 0) -> _Waiting:
    return _Waiting(life, Letter(said, memoryview(bytes(nbytes))))


def test_each_life_gets_its_own() -> None:
    cards = Cards(star(2, 1))
    machine = Worker(0, 2, Pace(1, 1, 1), lambda *_: None)
    machine.posts.clear()
    out = Outgoing(machine, cards.lanes[0])
    out._waiting[1] = deque([letter(0, b"old"), letter(1, b"new")])
    cards.lanes[0].forget(1)
    out.forget(1, 0)
    out.send()
    assert out.busy
    cards.lanes[0].renew(1, 1)
    cards.lanes[1] = cards.new(1, [0, 1], None, 10.0)
    out.send()
    assert not out.busy
    cards.run(1.0)
    assert cards.from_(0, 1) == [b"new"]
    out._waiting[1] = deque([letter(0, b"late")])
    out.send()
    assert not out.busy
    cards.run(1.0)
    assert cards.from_(0, 1) == [b"new"]


def test_what_is_for_the_next_life_does_not_leave_with_what_is_for_this_one() -> None:
    lane, machine = OneLane(100), Worker(0, 2, Pace(1, 1, 1), lambda *_: None)
    machine.posts.clear()
    out = Outgoing(machine, lane)
    out._waiting[1] = deque([letter(0, b"a"), letter(0, b"b"), letter(1, b"next")])
    out.send()
    assert lane.parts == [(BEGIN, b"ab")]
    assert out.busy


def test_who_comes_back_is_heard_by_those_who_have_come_back_before() -> None:
    """It does not know yet that theirs is not their first life, and nobody else tells them."""
    cards = Cards(star(3, 1))
    for worker, life in ((1, 4), (2, 1)):
        for other in (0, 3 - worker):
            cards.lanes[other].renew(worker, life)
        cards.lanes[worker] = cards.new(worker, [0, 4, 1], None, 10.0)
    machine = Worker(0, 3, Pace(1, 1, 1), lambda *_: None, life=1)
    reports = [post for post in machine.posts if isinstance(post.message, Report)]
    assert [post.to for post in reports] == [(1, 2)]
    out, went = Outgoing(machine, cards.lanes[0]), []
    cards.lanes[0].send = lambda worker, *_: went.append(worker) or True  # type: ignore
    out.send()
    assert {1, 2} <= set(went)


def test_all_get_a_part_by_turns_from_the_next_one_on() -> None:
    cards = Cards(star(4, 1))
    machine = Worker(1, 4, Pace(1, 1, 1), lambda *_: None)
    machine.posts.clear()
    out = Outgoing(machine, cards.lanes[1])
    went: list[int] = []
    real, half = cards.lanes[1].send, cards.lanes[1].largest // 2

    def send(worker: int, kind: int, payload: bytes) -> bool:
        went.append(worker)
        return real(worker, kind, payload)

    cards.lanes[1].send = send  # type: ignore[method-assign]
    for worker in (0, 2, 3):
        out._waiting[worker] = deque([letter(0, b"a", half), letter(0, b"b", half)])
    out.send()
    assert went == [2, 3, 0, 2, 3, 0]
    assert not out.busy
    went.clear()
    for worker in (0, 2, 3):
        out._waiting[worker] = deque([letter(0, b"c")])
    out.send()
    assert went == [2, 3, 0]  # the last turn had ended with 0


VIEW = whole(2)


def sent(messages: list[Message], lane: OneLane) -> Outgoing:
    machine = Worker(0, 2, Pace(1, 1, 1), lambda *_: None)
    machine.posts.clear()
    machine.posts.extend(Post((1,), message) for message in messages)
    out = Outgoing(machine, lane)
    out.send()
    return out


def heard(parts: list[tuple[int, bytes]], most: int = 1 << 20) -> list[Message]:
    incoming = Incoming(2, 1, most)
    return [said for kind, part in parts for _, said in incoming.take(kind, part)]


@given(
    st.lists(st.one_of(st.none(), st.binary(max_size=300)), max_size=8),
    st.integers(60, 400),
    st.integers(1, 4),
)
def test_all_comes_as_it_was_said_however_it_is_cut(
    payloads: list[bytes | None], largest: int, room: int
) -> None:
    said: list[Message] = [
        Pull(number, VIEW) if payload is None else Piece(number, 0, 1, VIEW, payload or None)
        for number, payload in enumerate(payloads)
    ]
    lane = OneLane(largest, room)
    out = sent(said, lane)
    while out.busy:
        assert not lane.room
        lane.room = room
        out.send()
    assert all(len(part) <= largest for _, part in lane.parts)
    back = heard(lane.parts)
    assert back == said
    assert [getattr(each, "payload", None) for each in back] == [
        getattr(each, "payload", None) for each in said
    ]


def test_short_ones_leave_together_and_a_long_one_alone() -> None:
    short, long = Pull(1, VIEW), Piece(0, 0, 1, VIEW, bytes(250))
    lane = OneLane(100)
    sent([short, short, long, short], lane)
    one = len(letter_of(short, 0).said)
    assert [(kind, len(part)) for kind, part in lane.parts] == [
        (BEGIN, 2 * one), (BEGIN, len(letter_of(long, 0).said)), (MORE, 100), (MORE, 100),
        (MORE, 50), (BEGIN, one),
    ]  # fmt: skip


def test_what_does_not_follow_what_came_before_is_refused() -> None:
    lane = OneLane(100)
    sent([Piece(0, 0, 1, VIEW, bytes(150))], lane)
    begin, more, last = lane.parts
    for parts in ([more], [begin, begin], [begin, (MORE, b"")], [begin, more, (MORE, bytes(51))],
                  [begin, more, last, last]):  # fmt: skip
        with pytest.raises(Malformed):
            heard(parts)
    with pytest.raises(Malformed, match="150 bytes would follow, and there is room for 149"):
        heard([begin], most=149)


def test_what_is_said_of_other_colayers_waits_for_these_or_is_left_out() -> None:
    """A worker may change its colayers sooner than this one, or later."""
    incoming = Incoming(2, 1, 100)
    marks = ((((-1,) * 2,) * 3),) * 2  # of three colayers, which are none of today's
    early, now = Report(whole(2), 4, marks), Pull(7, whole(2))
    parts = [b"".join(letter_of(message, 0, epoch)) for message, epoch in ((early, 1), (now, 0))]
    assert [list(incoming.take(BEGIN, part)) for part in parts] == [[], [(0, now)]]
    assert list(incoming.rebundled(3)) == [(0, early)]
    assert list(incoming.take(BEGIN, parts[1])) == []  # late
    assert list(incoming.take(BEGIN, parts[0])) == [(0, early)]
    with pytest.raises(Malformed, match="3 changes of colayers, and there were 1 here"):
        list(incoming.take(BEGIN, b"".join(letter_of(now, 0, 3))))
