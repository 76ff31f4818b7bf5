"""What a piece's owner sums with what."""

from __future__ import annotations

from wingbeat.methods.bounded_staleness.owned import Owned


def test_a_round_waits_for_an_answer_of_each() -> None:
    owned = Owned(3, 1, 0)
    owned.add(0, 0, 0, "a")
    owned.add(2, 0, 0, "c")
    assert list(owned.close((0, 1, 2))) == []
    owned.add(1, 0, 0, "b")
    assert list(owned.close((0, 1, 2))) == [(0, 0, {(0, 0): "a", (0, 1): "b", (0, 2): "c"})]
    assert list(owned.close((0, 1, 2))) == []


def test_who_has_nothing_yet_joins_a_later_round() -> None:
    owned = Owned(2, 1, 0)
    owned.add(0, 0, 0, "a0")
    owned.said(1, 0)  # the empty packet
    assert list(owned.close((0, 1))) == [(0, 0, {(0, 0): "a0"})]
    owned.add(1, 0, 0, "b0")
    owned.add(0, 1, 0, "a1")
    assert list(owned.close((0, 1))) == []
    owned.add(1, 1, 0, "b1")
    (closed,) = owned.close((0, 1))
    assert list(closed[2].items()) == [((0, 1), "b0"), ((1, 0), "a1"), ((1, 1), "b1")]


def test_who_is_ahead_waits_for_its_round() -> None:
    owned = Owned(2, 1, 0)
    for iteration in range(2):
        owned.add(0, iteration, 0, iteration)
    assert owned.first(0, 0, at=2) == 0
    owned.add(1, 0, 0, "b")
    assert list(owned.close((0, 1))) == [(0, 0, {(0, 0): 0, (0, 1): "b"})]
    assert owned.first(0, 0, at=2) == 1
    assert owned.first(0, 1, at=2) == 2


def test_colayers_do_not_wait_for_each_other() -> None:
    owned = Owned(1, 2, 5)
    owned.add(0, 5, 1, "x")
    assert list(owned.close((0,))) == [(1, 5, {(5, 0): "x"})]
    assert owned.next == [5, 6]


def test_what_waits_of_the_dead_is_forgotten() -> None:
    owned = Owned(2, 1, 0)
    owned.add(1, 0, 0, "b")
    owned.forget(1)
    owned.add(0, 0, 0, "a")
    assert list(owned.close((0, 1))) == []  # nor does its answer count
    assert list(owned.close((0,))) == [(0, 0, {(0, 0): "a"})]
