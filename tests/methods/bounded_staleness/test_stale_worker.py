"""One worker's machine, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from helpers.stale import Game, add
from wingbeat.methods.bounded_staleness.messages import (
    Entry,
    Here,
    Message,
    Piece,
    Pull,
    Report,
    Round,
)
from wingbeat.methods.bounded_staleness.pace import Pace
from wingbeat.methods.bounded_staleness.view import View, whole
from wingbeat.methods.bounded_staleness.worker import Worker


def machine(rank: int, n: int, pace: Pace, life: int = 0) -> Worker:
    return Worker(rank, n, pace, add, life=life)


def said(worker: Worker) -> list[Message]:
    """What it has posted since the last look."""
    out = [post.message for post in worker.posts]
    worker.posts.clear()
    return out


def here(at: int, view: View, **changed: object) -> Here:
    fields = {"said": at - 1, "applied": 0, "ended": False, "zeta": at} | changed
    return Here(at=at, view=view, **fields)  # type: ignore[arg-type]


def heres(worker: Worker) -> list[Here]:
    return [message for message in said(worker) if isinstance(message, Here)]


def test_a_slow_worker_says_that_it_has_nothing_only_two_iterations_behind() -> None:
    slow = machine(1, 2, Pace(None, 1, 1))
    slow.begin()
    said(slow)
    slow.receive(0, 0, here(1, whole(2)))
    assert [message.said for message in heres(slow)] == [-1]  # zeta alone is news
    slow.receive(0, 0, here(2, whole(2)))
    assert [message.said for message in heres(slow)] == [2]


def test_what_came_of_the_dead_is_not_summed_after_them() -> None:
    owner = machine(0, 2, Pace(0, 1, 1))
    owner.receive(1, 0, Piece(0, 0, 0, whole(2), 5.0))
    owner.lost(1, 0)
    owner.begin()
    owner.computed(0, [1.0, 2.0])
    parts = owner.take()
    assert parts is not None
    assert [part.entries for part in parts] == [((0, 0),), ((0, 0),)]
    assert [part.first for part in parts] == [(0, -1), (0, -1)]


def test_dropped_beyond_the_bound_and_what_was_sent_counts() -> None:
    slow = machine(1, 2, Pace(1, 2, 3))
    slow.begin()
    assert slow.computed(0, [1.0, 2.0])
    slow.receive(0, 0, here(1, whole(2)))
    assert not slow.dropped
    slow.receive(0, 0, here(2, whole(2)))
    assert slow.dropped == [(0, 1)]
    assert not slow.computed(1, [1.0, 2.0])
    slow.finish()
    assert slow.wanted == 2  # the fastest's


def test_kept_if_p_colayers_are_exchanged() -> None:
    slow = machine(1, 2, Pace(1, 2, 3))
    slow.begin()
    for colayer in range(2):
        slow.computed(colayer, [1.0, 2.0])
    slow.receive(0, 0, here(2, whole(2)))
    assert not slow.dropped
    assert slow.computed(2, [1.0, 2.0])


def test_the_fast_wait_for_whoever_would_be_left_behind() -> None:
    fast = machine(0, 2, Pace(1, 1, 1))
    assert not fast.ready()  # nothing is known of the other
    fast.receive(1, 0, here(0, whole(2)))
    for _ in range(2):
        assert fast.ready()
        fast.begin()
        fast.computed(0, [1.0, 2.0])
        fast.finish()
    assert not fast.ready()
    assert fast.behind() == (1,)


def test_whoever_is_taken_for_dead_hears_of_it() -> None:
    one, other = machine(0, 2, Pace(0, 1, 1)), machine(1, 2, Pace(0, 1, 1))
    one.lost(1, 0)
    for message in said(one):
        other.receive(0, 0, message)
    assert other.expelled


def test_whoever_comes_back_pulls_before_it_begins() -> None:
    old, new = machine(0, 2, Pace(0, 1, 1)), machine(1, 2, Pace(0, 1, 1), life=1)
    old.lost(1, 0)
    for _ in range(4):
        for message in said(old):
            new.receive(0, 0, message)
        for message in said(new):
            old.receive(1, 1, message)
    assert new.joining
    assert not new.ready()
    assert old.serve() == (1,)
    new.receive(0, 0, old.parameters("values"))
    assert new.adopt() == "values"
    assert not new.joining


def test_no_iteration_of_an_earlier_life_is_computed_again() -> None:
    # Some of its pieces may have been summed before it died, and the others not know of it.
    old, new = machine(0, 2, Pace(None, 1, 1)), machine(1, 2, Pace(None, 1, 1), life=1)
    old.lost(1, 0)
    for _ in range(4):
        for message in said(old):
            new.receive(0, 0, message)
        for message in said(new):
            old.receive(1, 1, message)
    new.receive(0, 0, replace(old.parameters("values"), marks=(((-1, 5),), ((-1, -1),))))
    assert new.adopt() == "values"
    assert new.wanted == 6


def test_nobody_is_left_with_parameters() -> None:
    new = machine(0, 1, Pace(0, 1, 1), life=1)
    assert new.stranded
    assert not any(isinstance(message, Pull | Round) for message in said(new))


def test_what_was_pulled_before_somebody_went_is_not_used() -> None:
    # The rounds that it has may be among those that are summed anew.
    old, new = machine(0, 3, Pace(0, 1, 1)), machine(1, 3, Pace(0, 1, 1), life=1)
    third = machine(2, 3, Pace(0, 1, 1))
    for survivor in (old, third):
        survivor.lost(1, 0)
    everyone = {0: old, 1: new, 2: third}
    for _ in range(6):
        for rank, worker in everyone.items():
            for post in list(worker.posts):
                for to in post.to:
                    everyone[to].receive(rank, worker.life, post.message)
            worker.posts.clear()
    new.receive(0, 0, old.parameters("values"))
    new.lost(2, 0)
    assert new.adopt() is None
    old.lost(2, 0)
    for message in said(old):
        new.receive(0, 0, message)
    assert new.adopt() is None
    assert new.joining


def test_one_that_has_not_gone_on_yet_keeps_its_place_while_another_ends_again() -> None:
    sums: list[tuple[int, int]] = []

    def combine(colayer: int, piece: int, waiting: dict[Entry, Any]) -> None:
        sums.extend(waiting)

    pair = [Worker(rank, 2, Pace(None, 1, 1), combine) for rank in range(2)]

    def deliver() -> None:
        while any(worker.posts for worker in pair):
            for rank, worker in enumerate(pair):
                while worker.posts:
                    for to in (post := worker.posts.popleft()).to:
                        pair[to].receive(rank, 0, post.message)

    def settle() -> None:
        deliver()
        assert all(worker.settled for worker in pair)

    for worker in pair:
        worker.end()
    settle()
    quick, slow = pair
    assert not slow.resumed_elsewhere
    quick.resume()
    quick.begin()
    quick.end()
    deliver()
    assert not quick.settled, "the other has not ended again"
    assert slow.resumed_elsewhere
    slow.resume()
    at = slow.begin()
    slow.computed(0, [1.0, 1.0])
    slow.finish()
    slow.end()
    settle()
    assert sums == [(at, 1)] * 2, "each piece once"


def test_other_colayers_begin_with_the_next_round_and_without_who_has_died_meanwhile() -> None:
    """Worker 1 was there when all had settled, and has come back since: its old life is over."""
    worker = Game(3, 2, Pace(1, 2, 2), iterations=3).play().living()[0].machine
    first = worker.applied
    assert first > 0
    worker.receive(1, 1, Report(View((0, 2)), -1, ((((-1, -1),) * 2),) * 2))
    worker.rebundle(Pace(1, 3, 3), add, whole(2))
    assert worker.life_of(1) is None
    assert worker._owned[0].next == [first] * 3
    assert (worker.wanted, worker.epoch, worker.ended) == (first, 1, False)
    reports = [post.message for post in worker.posts if isinstance(post.message, Report)]
    assert [report.view for report in reports] == [(0, 1)]
