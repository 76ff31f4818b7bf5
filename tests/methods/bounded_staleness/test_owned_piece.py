"""Rounds of a piece, as its owner closes them."""

from __future__ import annotations

from wingbeat.methods.bounded_staleness.rounds import OwnedPiece


def test_round_closes_when_each_worker_has_answered() -> None:
    owned = OwnedPiece(3, 1, 0)
    owned.add_contribution(0, 0, 0, "a")
    owned.add_contribution(2, 0, 0, "c")
    assert list(owned.close_rounds((0, 1, 2))) == []
    owned.add_contribution(1, 0, 0, "b")
    assert list(owned.close_rounds((0, 1, 2))) == [(0, 0, {(0, 0): "a", (0, 1): "b", (0, 2): "c"})]
    assert list(owned.close_rounds((0, 1, 2))) == []


def test_late_contribution_joins_later_round() -> None:
    owned = OwnedPiece(2, 1, 0)
    owned.add_contribution(0, 0, 0, "a0")
    owned.mark_sent_through(1, 0)  # the empty packet
    assert list(owned.close_rounds((0, 1))) == [(0, 0, {(0, 0): "a0"})]
    owned.add_contribution(1, 0, 0, "b0")
    owned.add_contribution(0, 1, 0, "a1")
    assert list(owned.close_rounds((0, 1))) == []
    owned.add_contribution(1, 1, 0, "b1")
    (closed,) = owned.close_rounds((0, 1))
    assert list(closed[2].items()) == [((0, 1), "b0"), ((1, 0), "a1"), ((1, 1), "b1")]


def test_early_contribution_waits_for_its_round() -> None:
    owned = OwnedPiece(2, 1, 0)
    for iteration in range(2):
        owned.add_contribution(0, iteration, 0, iteration)
    assert owned.earliest_pending(0, 0, iteration=2) == 0
    owned.add_contribution(1, 0, 0, "b")
    assert list(owned.close_rounds((0, 1))) == [(0, 0, {(0, 0): 0, (0, 1): "b"})]
    assert owned.earliest_pending(0, 0, iteration=2) == 1
    assert owned.earliest_pending(0, 1, iteration=2) == 2


def test_colayers_close_independently() -> None:
    owned = OwnedPiece(1, 2, 5)
    owned.add_contribution(0, 5, 1, "x")
    assert list(owned.close_rounds((0,))) == [(1, 5, {(5, 0): "x"})]
    assert owned.next_rounds == [5, 6]


def test_remove_worker_discards_pending_contributions() -> None:
    owned = OwnedPiece(2, 1, 0)
    owned.add_contribution(1, 0, 0, "b")
    owned.remove_worker(1)
    owned.add_contribution(0, 0, 0, "a")
    assert list(owned.close_rounds((0, 1))) == []  # its answer does not count either
    assert list(owned.close_rounds((0,))) == [(0, 0, {(0, 0): "a"})]
