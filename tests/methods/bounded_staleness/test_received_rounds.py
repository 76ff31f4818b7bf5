"""Rounds as a worker receives and applies them."""

from __future__ import annotations

from wingbeat.methods.bounded_staleness.messages import PieceSum
from wingbeat.methods.bounded_staleness.rounds import ReceivedRounds
from wingbeat.transport.membership import initial_view


def part(piece: int, number: int, *entries: tuple[int, int]) -> PieceSum:
    return PieceSum(0, piece, number, entries, (0, 0), initial_view(2))


def test_complete_rounds_are_taken_in_order() -> None:
    rounds = ReceivedRounds(2, 1)
    for number in range(2):
        rounds.add_sum(part(1, number))
    assert rounds.take_round() is None
    rounds.add_sum(part(0, 0, (0, 1)))
    assert (rounds.complete, rounds.applied) == (1, 0)
    taken = rounds.take_round()
    assert taken is not None
    assert [p.piece for p in taken] == [0, 1]
    assert rounds.take_round() is None


def test_watermarks_cover_applied_or_complete_rounds() -> None:
    rounds = ReceivedRounds(2, 1)
    rounds.add_sum(part(0, 0, (3, 1)))
    rounds.add_sum(part(1, 0, (2, 1)))
    assert rounds.watermarks(complete=True) == (((-1, 3),), ((-1, 2),))
    assert rounds.watermarks(complete=False) == (((-1, -1),), ((-1, -1),))
    rounds.take_round()
    assert (rounds.last_fully_applied(0, 1), rounds.last_partly_applied(1)) == (2, 3)


def test_frozen_rounds_do_not_complete() -> None:
    rounds = ReceivedRounds(2, 1)
    rounds.add_sum(part(0, 0))
    rounds.freeze(True)
    rounds.add_sum(part(1, 0))
    assert rounds.complete == 0
    rounds.freeze(False)
    assert rounds.complete == 1


def test_restarted_piece_makes_round_incomplete() -> None:
    rounds = ReceivedRounds(2, 1)
    for piece in range(2):
        rounds.add_sum(part(piece, 0))
    rounds.restart_piece(1, 0)
    assert rounds.complete == 0
    assert rounds.is_next(part(1, 0))
    assert not rounds.is_next(part(0, 0))
    rounds.add_sum(part(1, 0))
    assert rounds.complete == 1


def test_lost_round_sets_pull_target() -> None:
    rounds = ReceivedRounds(2, 1)
    rounds.add_sum(part(0, 0))
    rounds.restart_piece(1, 1)  # another worker has its round 0
    assert rounds.pull_target == 1
    rounds.restart_piece(1, 0)  # that worker has died as well
    assert rounds.pull_target is None


def test_skip_to_continues_from_pulled_rounds() -> None:
    rounds = ReceivedRounds(2, 1)
    rounds.clear_expected()
    assert not rounds.knows_first_rounds
    rounds.expect(0, [4])
    rounds.expect(1, [2])
    assert rounds.pull_target == 4
    for number in (2, 3, 4):
        rounds.add_sum(part(1, number))
    rounds.skip_to(4, (((7, 7),), ((7, 7),)))
    assert rounds.pull_target is None
    assert rounds.last_fully_applied(0, 0) == 7
    rounds.add_sum(part(0, 4))
    taken = rounds.take_round()
    assert taken is not None
    assert {p.number for p in taken} == {4}


def test_rounds_in_pulled_parameters_are_not_kept() -> None:
    rounds = ReceivedRounds(2, 1)
    rounds.skip_to(3, (((1, 1),), ((1, 1),)))
    for number in range(3):
        for piece in range(2):
            rounds.add_sum(part(piece, number))
    assert not rounds._received
    assert rounds.complete == 3


def test_dropped_rounds_set_pull_target() -> None:
    rounds = ReceivedRounds(2, 1)
    for number in range(3):
        for piece in range(2):
            rounds.add_sum(part(piece, number))
    rounds.drop_before(2)
    assert (rounds.pull_target, rounds.complete) == (2, 0)
    rounds.skip_to(2, rounds.watermarks(complete=False))
    assert (rounds.pull_target, rounds.complete) == (None, 3)
