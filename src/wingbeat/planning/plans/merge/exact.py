"""The best plan of all, by a search over Pareto labels (in C++, ``native/src/merge.h``)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wingbeat import _native
from wingbeat.errors import UsageError
from wingbeat.planning.costs.curve import Floats
from wingbeat.planning.costs.workload import Costs, Workload
from wingbeat.planning.plans.merge.exhaustive import TIE
from wingbeat.planning.plans.merge.runs import Positions, Runs, plan_of
from wingbeat.types import Plan

WIDTH, ROOM, GROWTH = 32, 4, 4
"""Corners and beginnings kept for each position in the first round, and how both grow."""
UNLIMITED = 2**63
"""Work that nobody does."""


@dataclass(frozen=True, slots=True)
class Bounded:
    """What a search with limited work has found.

    Attributes:
        plan: the best plan, or the best that was found.
        least_s: no plan finishes earlier, rounding aside; the plan's own finish, or within a tie
            of it, if it is the best.
        proven: whether the plan is the best, ties and all, as `exact` returns it.
    """

    plan: Plan
    least_s: float
    proven: bool


def exact(workload: Workload, costs: Costs) -> Plan:
    """Return the plan of runs with the least ``finish_s`` of all ``2**(L - 1)`` (Eqs. 16 to 19).

    Finishes that are equal within rounding (1e-12 of them) are ties; they go to fewer buckets, and
    then to the lesser finish. The curves may have any shape. The same input gives the same plan.

    **Why two numbers.** By Eqs. 5 to 9 and 13 to 15 a bucket that ends with the tensor ready at r
    turns what was before it into

        free' = max(r + delayed + e, free) + c,    delayed' = delayed + e + w

    where e, c and w, by which its exchange delays backward, depend on the bucket alone. So a
    beginning matters for the rest only by the pair (delayed, free), Eq. 17 is the last ``free``,
    and both right-hand sides never fall when ``delayed`` or ``free`` grow, rounding included. A
    beginning whose pair is no less than another's, in both numbers, at the same position, can be
    dropped: whatever follows, the other is no worse. What remains at each position is a Pareto
    front, and searching all of it is exact.

    **Why not one.** Only if delays are proportional to elements and bytes is ``delayed`` the same
    for all beginnings, and ``free`` alone enough: O(L^2). With ``a + b * d`` it still differs by
    how many buckets there are, and with Eq. 10 by where they are cut: a beginning that frees the
    links sooner may have delayed backward for longer. Theorem 1 of the paper overlooks this.

    **From both ends.** The rest of a plan matters by two numbers as well: ``rest``, the seconds its
    exchanges take, and ``late``, when its last exchange would end behind links always free and with
    nothing delayed before. With a beginning it makes

        finish_s = max(delayed + late, free + rest)

    and a bucket in front makes of it ``c + rest`` and ``max(r + e + c + rest, e + w + late)``.

    **Why it ends soon.** Fronts may be long (no polynomial bound is known for curves of any
    shape). So a front is thinned: neighbours are replaced by the corner below them, which still
    bounds them all. A round bounds rests from the end in this way, then follows from the start the
    most hopeful beginnings, as many as there is room for, which gives better plans; then it bounds
    beginnings as it did rests. Neither end keeps what cannot finish, by the bounds of the other,
    before the best plan so far. What is left shrinks from round to round while there is room for
    more, until nothing has to be dropped: then the best plan is found. 500 tensors take about 10 ms
    in all, curves with jumps now and then some tenths of a second.
    """
    return bounded(workload, costs, UNLIMITED).plan


def bounded(workload: Workload, costs: Costs, work: int) -> Bounded:
    """Do the same with limited work: return what `exact` does, or else the best plan found.

    Work is counted, not timed, so the same input gives the same plan.

    Args:
        workload: what backward brings.
        costs: what buckets cost.
        work: beginnings and rests of plans it may look at, about; each takes some 10 ns.

    Raises:
        UsageError: ``work`` is negative or no whole number.
    """
    if type(work) is not int or not 0 <= work <= UNLIMITED:
        raise UsageError(f"work={work!r}: allowed are whole numbers, 0 to 2**63")
    if not len(workload):
        return Bounded(Plan(()), 0.0, True)
    runs = Runs(workload, costs)
    starts, stops = _all(runs)
    encode, exchange = runs.encode(starts, stops), runs.exchange(starts, stops)
    delay = runs.delay(starts, stops)
    best, least_s, proven = _native.best_merge(
        len(runs),
        _address(runs.ready),
        _address(runs.first),
        _address(encode),
        _address(exchange),
        _address(delay),
        TIE,
        WIDTH,
        ROOM,
        GROWTH,
        work,
    )
    return Bounded(plan_of(workload, best), least_s, proven)


def _all(runs: Runs) -> tuple[Positions, Positions]:
    """Return starts and stops of all runs, by stop and then by start."""
    places = np.arange(len(runs) + 1)
    counts = places - runs.first
    stops = np.repeat(places, counts)
    starts = np.arange(len(stops)) - np.repeat(np.cumsum(counts) - places, counts)
    return starts, stops


def _address(array: Floats | Positions) -> int:
    """Return where an array lies, as the search needs it."""
    assert array.flags.c_contiguous, "the search reads one number after the other"
    assert array.dtype in (np.float64, np.int64), array.dtype
    assert np.isfinite(array).all(), "seconds are finite"
    return int(array.ctypes.data)
