"""What is for a life that is over goes nowhere, and what is for the next one waits for it."""

from __future__ import annotations

from collections import deque

from helpers.cards import Cards, star
from wingbeat.exchanges.lanes.lanes import BEGIN
from wingbeat.exchanges.outgoing import Outgoing
from wingbeat.stale.messages import Report
from wingbeat.stale.pace import Pace
from wingbeat.stale.worker import Worker


def test_each_life_gets_its_own() -> None:
    cards = Cards(star(2, 1))
    machine = Worker(0, 2, Pace(1, 1, 1), lambda *_: None)
    machine.posts.clear()
    out = Outgoing(machine, cards.lanes[0])
    out._waiting[1] = deque([(0, iter([(BEGIN, b"old")])), (1, iter([(BEGIN, b"new")]))])
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
    out._waiting[1] = deque([(0, iter([(BEGIN, b"late")]))])
    out.send()
    assert not out.busy
    cards.run(1.0)
    assert cards.from_(0, 1) == [b"new"]


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
    real = cards.lanes[1].send

    def send(worker: int, kind: int, payload: bytes) -> bool:
        went.append(worker)
        return real(worker, kind, payload)

    cards.lanes[1].send = send  # type: ignore[method-assign]
    for worker in (0, 2, 3):
        out._waiting[worker] = deque([(0, iter([(BEGIN, b"a"), (BEGIN, b"b")]))])
    out.send()
    assert went == [2, 3, 0, 2, 3, 0]
    assert not out.busy
    went.clear()
    for worker in (0, 2, 3):
        out._waiting[worker] = deque([(0, iter([(BEGIN, b"c")]))])
    out.send()
    assert went == [2, 3, 0]  # the last turn had ended with 0
