"""Who takes part, and how all come to agree on it."""

from __future__ import annotations

from wingbeat.methods.bounded_staleness.agreement import Agreement
from wingbeat.methods.bounded_staleness.messages import Report
from wingbeat.methods.bounded_staleness.view import (
    View,
    covers,
    inherited,
    members,
    merge,
    nobody,
    owner,
    whole,
    with_life,
    without,
)


def test_a_life_that_is_over_never_comes_back() -> None:
    view = without(whole(3), 1)
    assert members(view) == (0, 2)
    assert without(view, 1) == view
    again = with_life(view, 1, 1)
    assert members(again) == (0, 1, 2)
    assert with_life(without(again, 1), 1, 1) == without(again, 1)


def test_merging_is_the_same_in_any_order() -> None:
    a, b = without(whole(3), 0), with_life(without(whole(3), 1), 1, 2)
    assert merge(a, b) == merge(b, a) == View((1, 4, 0))
    assert covers(merge(a, b), a)
    assert not covers(a, b)
    assert not covers(nobody(3), whole(3))


def test_pieces_pass_to_the_next_that_lives_and_back() -> None:
    view = without(without(whole(4), 3), 0)
    assert [owner(view, piece) for piece in range(4)] == [1, 1, 2, 1]
    assert [inherited(view, piece) for piece in range(4)] == [True, False, False, True]
    back = with_life(view, 3, 1)
    assert owner(back, 3) == 3
    assert inherited(back, 3)  # what it had begun before is begun anew


def report(view: View, complete: int) -> Report:
    return Report(view, complete, ())


def test_agreed_once_everyone_has_told_the_same() -> None:
    mine = Agreement(whole(3))
    assert mine.conclude() is None
    view = without(whole(3), 2)
    assert mine.propose(view)
    assert not mine.propose(view)
    assert mine.frozen
    mine.hear(0, report(view, 4))
    mine.hear(1, report(whole(3), 9))  # on another view
    assert mine.conclude() is None
    mine.hear(1, report(view, 5))
    agreed = mine.conclude()
    assert agreed is not None
    assert (agreed.view, agreed.best.complete) == (view, 5)
    assert not mine.frozen


def test_more_news_in_between_begins_anew() -> None:
    mine = Agreement(whole(3))
    mine.propose(without(whole(3), 2))
    mine.hear(0, report(mine.proposed, 4))
    mine.hear(1, report(mine.proposed, 4))
    mine.propose(with_life(mine.proposed, 2, 1))
    assert mine.conclude() is None


def test_of_equals_the_first_is_taken_by_all() -> None:
    mine = Agreement(whole(2))
    mine.propose(View((0, 2)))
    mine.hear(1, Report(View((0, 2)), 4, ((),)))
    mine.hear(0, Report(View((0, 2)), 4, ()))
    agreed = mine.conclude()
    assert agreed is not None
    assert agreed.best.marks == ()
