"""The gradient exchange index."""

from __future__ import annotations

from wingbeat.methods.bounded_staleness.messages import Contribution, PieceSum
from wingbeat.methods.bounded_staleness.rounds import Gei
from wingbeat.transport.membership import initial_view

WORKERS, COLAYERS = 8, 2


def parts(
    entries: dict[tuple[int, int], tuple[Contribution, ...]], at: tuple[int, ...], number: int = 0
) -> list[PieceSum]:
    """Return a round with these entries by colayer and piece, and empty parts elsewhere."""
    return [
        PieceSum(z, q, number, entries.get((z, q), ()), at, initial_view(WORKERS))
        for z in range(COLAYERS)
        for q in range(WORKERS)
    ]


def all_of(*entries: Contribution) -> dict[tuple[int, int], tuple[Contribution, ...]]:
    return {(z, q): entries for z in range(COLAYERS) for q in range(WORKERS)}


def test_row_equals_example_of_paper() -> None:
    # Fig. 16b counts workers from 1: 1, 4, 6, 7 and 8 are 0, 3, 5, 6 and 7 here.
    gei = Gei(WORKERS, COLAYERS)
    gei.apply_round(parts(all_of(*((0, worker) for worker in (0, 3, 5, 6, 7))), (0,) * WORKERS))
    assert gei.row(0) == (233, 233)


def test_bit_is_set_when_all_pieces_are_applied() -> None:
    gei = Gei(WORKERS, COLAYERS)
    entries = all_of((0, 2))
    del entries[1, 4]
    gei.apply_round(parts(entries, (0,) * WORKERS))
    assert gei.row(0) == (4, 0)
    gei.apply_round(parts({(1, 4): ((0, 2),)}, (0,) * WORKERS))
    assert gei.row(0) == (4, 4)


def test_own_bits_are_set_when_sent() -> None:
    gei = Gei(WORKERS, COLAYERS)
    assert gei.exchanged(0) == 0
    gei.mark_sent(0, 1)
    assert gei.row(0, own=3) == (0, 8)
    assert gei.row(0) == (0, 0)
    assert (gei.exchanged(0), gei.exchanged(1)) == (1, 0)


def test_enter_adds_rows_up_to_iteration() -> None:
    gei = Gei(WORKERS, COLAYERS)
    gei.enter(4)
    gei.enter(2)
    assert gei.zeta == 4
    assert gei.row(4) == (0, 0)


def test_complete_rows_are_retired() -> None:
    gei = Gei(WORKERS, COLAYERS)
    present = [(0, worker) for worker in range(WORKERS) if worker not in (1, 2)]
    gei.enter(1)
    retired = gei.apply_round(parts(all_of(*present), (0, 0, 0, *(0,) * 5)))
    assert (gei.retired, retired) == (0, [])  # 1 and 2 are still at 0
    retired = gei.apply_round(parts({}, (0, 1, 0, *(0,) * 5)))
    assert (gei.retired, retired) == (0, [])
    # One worker is past it, and one is dead.
    retired = gei.apply_round(parts({}, (0, 1, -1, *(0,) * 5)))
    assert (gei.retired, retired) == (1, [(0b11111001,) * 2])


def test_adopt_takes_rows_and_keeps_own_bits() -> None:
    gei, other = Gei(WORKERS, COLAYERS), Gei(WORKERS, COLAYERS)
    other.enter(3)
    other.apply_round(parts(all_of((1, 0)), (2, *(1,) * 7)))
    other.mark_sent(3, 0)
    assert other.retired == 1
    gei.mark_sent(2, 1)
    gei.adopt(other.state())
    assert (gei.retired, gei.zeta, gei.row(1)) == (1, 3, (1, 1))
    assert (gei.exchanged(2), gei.exchanged(3)) == (1, 0)
    other.apply_round(parts(all_of((1, 5)), (2, *(1,) * 7)))
    assert gei.row(1) == (1, 1)  # a copy


def test_row_of_thousand_workers() -> None:
    gei = Gei(1000, 1)
    pieces = [PieceSum(0, q, 0, ((0, 999),), (0,) * 1000, initial_view(1000)) for q in range(1000)]
    gei.apply_round(pieces)
    assert gei.row(0) == (1 << 999,)


def test_rows_returns_masks_by_piece() -> None:
    gei = Gei(2, 1)
    gei.apply_round([PieceSum(0, q, 0, ((0, 1),), (0, 0), initial_view(2)) for q in range(2)])
    assert gei.rows == {0: [[2, 2]]}


def test_with_colayers_clears_rows_and_scales_count() -> None:
    gei = Gei(2, 2)
    gei.counted = 2 * 2 * 2 * 5
    gei.mark_sent(3, 1)
    new = gei.with_colayers(3, 5)
    assert (new.retired, new.zeta, new.exchanged(3)) == (5, 5, 0)
    assert new.row(5) == (0, 0, 0)
    assert new.counted == 2 * 2 * 3 * 5
