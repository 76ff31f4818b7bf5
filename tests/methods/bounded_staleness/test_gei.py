"""The gradient exchange index, by hand."""

from __future__ import annotations

from wingbeat.methods.bounded_staleness.gei import Gei
from wingbeat.methods.bounded_staleness.messages import Entry, Round
from wingbeat.methods.bounded_staleness.view import whole

WORKERS, COLAYERS = 8, 2


def parts(
    entries: dict[tuple[int, int], tuple[Entry, ...]], at: tuple[int, ...], number: int = 0
) -> list[Round]:
    """A round of all pieces: entries by colayer and piece, nothing elsewhere."""
    return [
        Round(z, q, number, entries.get((z, q), ()), at, whole(WORKERS))
        for z in range(COLAYERS)
        for q in range(WORKERS)
    ]


def all_of(*entries: Entry) -> dict[tuple[int, int], tuple[Entry, ...]]:
    return {(z, q): entries for z in range(COLAYERS) for q in range(WORKERS)}


def test_the_paper_s_233() -> None:
    # Fig. 16b counts workers from 1: 1, 4, 6, 7 and 8 are 0, 3, 5, 6 and 7 here.
    gei = Gei(WORKERS, COLAYERS)
    gei.apply(parts(all_of(*((0, worker) for worker in (0, 3, 5, 6, 7))), (0,) * WORKERS))
    assert gei.row(0) == (233, 233)


def test_a_bit_needs_all_pieces() -> None:
    gei = Gei(WORKERS, COLAYERS)
    entries = all_of((0, 2))
    del entries[1, 4]
    gei.apply(parts(entries, (0,) * WORKERS))
    assert gei.row(0) == (4, 0)
    gei.apply(parts({(1, 4): ((0, 2),)}, (0,) * WORKERS))
    assert gei.row(0) == (4, 4)


def test_own_bits_are_set_as_pieces_are_sent() -> None:
    gei = Gei(WORKERS, COLAYERS)
    assert gei.exchanged(0) == 0
    gei.sent(0, 1)
    assert gei.row(0, own=3) == (0, 8)
    assert gei.row(0) == (0, 0)
    assert (gei.exchanged(0), gei.exchanged(1)) == (1, 0)


def test_a_row_for_each_iteration_that_anybody_has_entered() -> None:
    gei = Gei(WORKERS, COLAYERS)
    gei.enter(4)
    gei.enter(2)
    assert gei.zeta == 4
    assert gei.row(4) == (0, 0)


def test_rows_are_retired_when_nothing_can_be_added() -> None:
    gei = Gei(WORKERS, COLAYERS, keep=True)
    present = [(0, worker) for worker in range(WORKERS) if worker not in (1, 2)]
    gei.enter(1)
    gei.apply(parts(all_of(*present), (0, 0, 0, *(0,) * 5)))
    assert gei.retired == 0  # 1 and 2 are still at 0
    gei.apply(parts({}, (0, 1, 0, *(0,) * 5)))
    assert gei.retired == 0
    gei.apply(parts({}, (0, 1, -1, *(0,) * 5)))  # one is past it, and one is gone
    assert gei.retired == 1
    assert gei.history == [(0b11111001,) * 2]


def test_whoever_pulls_has_the_others_rows_and_its_own_bits() -> None:
    gei, other = Gei(WORKERS, COLAYERS), Gei(WORKERS, COLAYERS)
    other.enter(3)
    other.apply(parts(all_of((1, 0)), (2, *(1,) * 7)))
    other.sent(3, 0)
    assert other.retired == 1
    gei.sent(2, 1)
    gei.adopt(other.applied())
    assert (gei.retired, gei.zeta, gei.row(1)) == (1, 3, (1, 1))
    assert (gei.exchanged(2), gei.exchanged(3)) == (1, 0)
    other.apply(parts(all_of((1, 5)), (2, *(1,) * 7)))
    assert gei.row(1) == (1, 1)  # a copy


def test_a_thousand_workers() -> None:
    gei = Gei(1000, 1)
    pieces = [Round(0, q, 0, ((0, 999),), (0,) * 1000, whole(1000)) for q in range(1000)]
    gei.apply(pieces)
    assert gei.row(0) == (1 << 999,)


def test_it_tells_its_rows() -> None:
    gei = Gei(2, 1)
    gei.apply([Round(0, q, 0, ((0, 1),), (0, 0), whole(2)) for q in range(2)])
    assert gei.rows == {0: [[2, 2]]}


def test_other_colayers_begin_with_empty_rows_and_count_what_was_counted() -> None:
    gei = Gei(2, 2, keep=True)
    gei.counted = 2 * 2 * 2 * 5
    gei.sent(3, 1)
    new = gei.rebundled(3, 5)
    assert (new.retired, new.zeta, new.exchanged(3)) == (5, 5, 0)
    assert new.row(5) == (0, 0, 0)
    assert new.counted == 2 * 2 * 3 * 5
    assert new.history == [(0, 0)] * 5
