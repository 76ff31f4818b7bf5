"""Views, and the agreement on a view change."""

from __future__ import annotations

from wingbeat.methods.bounded_staleness.messages import ViewProposal, is_reassigned, piece_owner
from wingbeat.methods.bounded_staleness.worker import ViewChange
from wingbeat.transport.membership import (
    View,
    initial_view,
    with_incarnation,
    without_worker,
)


def test_piece_of_dead_worker_is_reassigned() -> None:
    view = without_worker(without_worker(initial_view(4), 3), 0)
    assert [piece_owner(view, piece) for piece in range(4)] == [1, 1, 2, 1]
    assert [is_reassigned(view, piece) for piece in range(4)] == [True, False, False, True]
    back = with_incarnation(view, 3, 1)
    assert piece_owner(back, 3) == 3
    assert is_reassigned(back, 3)  # its rounds restart


def proposal(view: View, complete: int) -> ViewProposal:
    return ViewProposal(view, complete, ())


def test_view_commits_with_equal_proposals_of_all_members() -> None:
    change = ViewChange(initial_view(3))
    assert change.commit() is None
    view = without_worker(initial_view(3), 2)
    assert change.propose(view)
    assert not change.propose(view)
    assert change.in_progress
    change.add_proposal(0, proposal(view, 4))
    change.add_proposal(1, proposal(initial_view(3), 9))  # for another view
    assert change.commit() is None
    change.add_proposal(1, proposal(view, 5))
    committed = change.commit()
    assert committed is not None
    assert (committed.view, committed.best.complete) == (view, 5)
    assert not change.in_progress


def test_larger_view_restarts_view_change() -> None:
    change = ViewChange(initial_view(3))
    change.propose(without_worker(initial_view(3), 2))
    change.add_proposal(0, proposal(change.proposed, 4))
    change.add_proposal(1, proposal(change.proposed, 4))
    change.propose(with_incarnation(change.proposed, 2, 1))
    assert change.commit() is None


def test_best_of_equal_proposals_is_lowest_rank() -> None:
    change = ViewChange(initial_view(2))
    change.propose(View((0, 2)))
    change.add_proposal(1, ViewProposal(View((0, 2)), 4, ((),)))
    change.add_proposal(0, ViewProposal(View((0, 2)), 4, ()))
    committed = change.commit()
    assert committed is not None
    assert committed.best.watermarks == ()
