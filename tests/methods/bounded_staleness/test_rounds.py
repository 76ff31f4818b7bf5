"""Rounds as they come: complete ones in order, and none twice."""

from __future__ import annotations

from wingbeat.methods.bounded_staleness.messages import Round
from wingbeat.methods.bounded_staleness.rounds import Rounds
from wingbeat.methods.bounded_staleness.view import whole


def part(piece: int, number: int, *entries: tuple[int, int]) -> Round:
    return Round(0, piece, number, entries, (0, 0), whole(2))


def test_complete_when_all_pieces_are_here_and_taken_in_order() -> None:
    rounds = Rounds(2, 1)
    for number in range(2):
        rounds.add(part(1, number))
    assert rounds.take() is None
    rounds.add(part(0, 0, (0, 1)))
    assert (rounds.complete, rounds.applied) == (1, 0)
    taken = rounds.take()
    assert taken is not None
    assert [p.piece for p in taken] == [0, 1]
    assert rounds.take() is None


def test_marks_are_of_what_is_applied_or_complete() -> None:
    rounds = Rounds(2, 1)
    rounds.add(part(0, 0, (3, 1)))
    rounds.add(part(1, 0, (2, 1)))
    assert rounds.marks(complete=True) == (((-1, 3),), ((-1, 2),))
    assert rounds.marks(complete=False) == (((-1, -1),), ((-1, -1),))
    rounds.take()
    assert (rounds.counted(0, 1), rounds.touched(1)) == (2, 3)


def test_no_more_is_complete_than_was_told() -> None:
    rounds = Rounds(2, 1)
    rounds.add(part(0, 0))
    rounds.hold()
    rounds.add(part(1, 0))
    assert rounds.complete == 0
    rounds.go_on()
    assert rounds.complete == 1


def test_what_is_summed_anew_is_complete_no_more() -> None:
    rounds = Rounds(2, 1)
    for piece in range(2):
        rounds.add(part(piece, 0))
    rounds.restart(1, 0)
    assert rounds.complete == 0
    assert rounds.expects(part(1, 0))
    assert not rounds.expects(part(0, 0))
    rounds.add(part(1, 0))
    assert rounds.complete == 1


def test_a_round_that_went_with_the_dead_is_lacking() -> None:
    rounds = Rounds(2, 1)
    rounds.add(part(0, 0))
    rounds.restart(1, 1)  # somebody else has round 0 of it
    assert rounds.lacking == 1
    rounds.restart(1, 0)  # who has died as well
    assert rounds.lacking is None


def test_who_comes_back_goes_on_from_what_was_pulled() -> None:
    rounds = Rounds(2, 1)
    rounds.know_nothing()
    assert not rounds.knows_all
    rounds.expect(0, [4])
    rounds.expect(1, [2])
    assert rounds.lacking == 4
    for number in (2, 3, 4):
        rounds.add(part(1, number))
    rounds.skip(4, (((7, 7),), ((7, 7),)))
    assert rounds.lacking is None
    assert rounds.counted(0, 0) == 7
    rounds.add(part(0, 4))
    taken = rounds.take()
    assert taken is not None
    assert {p.number for p in taken} == {4}


def test_what_pulled_parameters_have_is_not_kept() -> None:
    rounds = Rounds(2, 1)
    rounds.skip(3, (((1, 1),), ((1, 1),)))
    for number in range(3):
        for piece in range(2):
            rounds.add(part(piece, number))
    assert not rounds._have
    assert rounds.complete == 3


def test_rounds_that_were_let_go_are_lacking() -> None:
    rounds = Rounds(2, 1)
    for number in range(3):
        for piece in range(2):
            rounds.add(part(piece, number))
    rounds.drop(2)
    assert (rounds.lacking, rounds.complete) == (2, 0)
    rounds.skip(2, rounds.marks(complete=False))
    assert (rounds.lacking, rounds.complete) == (None, 3)
