"""The best plan of all, by dynamic programming over Pareto labels."""

from __future__ import annotations

import numpy as np

from wingbeat.costs.curve import Floats
from wingbeat.costs.workload import Costs, Workload
from wingbeat.plans.merge.bounds import Rests, Table, Window, pareto
from wingbeat.plans.merge.exhaustive import TIE
from wingbeat.plans.merge.fewest import fewest
from wingbeat.plans.merge.runs import plan_of
from wingbeat.types import Plan

WIDTH, ROOM, GROWTH = 96, 4, 4
"""Pairs and beginnings kept for each position in the first round, and how both grow."""
SHARE = 0.5
"""How far from the least bound to the best plan known the first rounds look."""
CROWD = 8
"""Beginnings that are compared with each other, for each that is kept."""


def exact(workload: Workload, costs: Costs) -> Plan:
    """Return the plan of runs with the least ``finish_s`` of all ``2**(L - 1)`` (Eqs. 16 to 19).

    Finishes that are equal within rounding (1e-12 of them) are ties; they go to fewer buckets, and
    then to the lesser finish. The curves may have any shape. The same input gives the same plan.

    **Why two numbers.** By Eqs. 5 to 9 and 13 to 15 a bucket that ends with the tensor ready at r
    turns what was before it into

        encoded' = encoded + e,    free' = max(r + encoded', free) + c

    where e and c depend on the bucket alone. So a beginning matters for the rest only by the pair
    (encoded, free), Eq. 17 is the last ``free``, and both right-hand sides never fall when
    ``encoded`` or ``free`` grow, rounding included. A beginning whose pair is no less than
    another's, in both numbers, at the same position, can be dropped: whatever follows, the other
    is no worse. What remains at each position is a Pareto front, and searching all of it is exact.

    **Why not one.** Only if encoding costs are proportional to elements is ``encoded`` the same
    for all beginnings, and ``free`` alone enough: O(L^2). With ``a + b * d`` it still differs by
    how many buckets there are, and with Eq. 10 by where they are cut: a beginning that frees the
    links sooner may have delayed backward for longer. Theorem 1 of the paper overlooks this.

    **Why it ends soon.** Fronts may be long (no polynomial bound is known for curves of any
    shape), so beginnings that cannot finish by some time aimed at are dropped too. A round bounds
    the rest of a plan from its end (`Rests`), then follows beginnings from its start, as many as
    there is ``room`` for at each position, the most hopeful. If it dropped none for want of room,
    it has found the best plan or proved that none finishes by that time. Otherwise the next has
    more room, and better bounds to begin with. 500 tensors take some tenths of a second, but
    curves with jumps can take many seconds and half a gigabyte.
    """
    if not len(workload):
        return Plan(())
    table = Table(workload, costs)
    width, room, share = WIDTH, ROOM, SHARE
    rests = None
    while table.best > table.least * (1.0 + TIE):
        aim = table.least + share * (table.best - table.least)
        window = Window(table, aim)
        rests = Rests(window, width)
        finish, complete = _forward(window, rests, room)
        table.best = min(table.best, finish)
        table.least = max(table.least, min(rests.least, aim))
        if complete and finish <= aim:
            break
        if complete or rests.least > aim:
            table.least, share = aim, 1.0
        else:
            width, room = width * GROWTH, room * GROWTH
    window = Window(table, table.best * (1.0 + TIE))
    stops = fewest(window, rests or Rests(window, WIDTH), table.best * (1.0 + TIE))
    return plan_of(workload, stops)


def _forward(window: Window, rests: Rests, room: int) -> tuple[float, bool]:
    """Return the least finish found, and whether no beginning was dropped for want of room.

    Infinite if none was found within the window's limit.
    """
    table = window.table
    shape = (table.count + 1, room)
    encoded, free = np.full(shape, np.inf), np.full(shape, np.inf)
    encoded[0, 0] = free[0, 0] = 0.0
    kept = [1] + [0] * table.count
    complete = True
    for stop in range(1, table.count + 1):
        starts = slice(window.first[stop], window.last[stop])
        width = max(kept[starts], default=0)
        if not width:
            continue
        after = encoded[starts, :width] + window.encode[stop, starts, None]
        sent = np.maximum(table.ready[stop] + after, free[starts, :width])
        sent += window.exchange[stop, starts, None]
        hope = np.maximum(after + table.least_late[stop], sent + table.least_rest[stop])
        hopeful = hope <= window.limit
        after, sent, dropped = _best(rests, stop, after[hopeful], sent[hopeful], window.limit, room)
        kept[stop] = len(sent)
        encoded[stop, : len(sent)], free[stop, : len(sent)] = after, sent
        complete &= not dropped
    return float(free[-1].min()), complete


def _best(
    rests: Rests, stop: int, encoded: Floats, free: Floats, limit: float, room: int
) -> tuple[Floats, Floats, bool]:
    """Return the Pareto front of what may finish by the limit; and whether it had no room."""
    bound = rests.finish(stop, encoded, free)
    chosen = np.flatnonzero(bound <= limit)
    dropped = False
    for size in (CROWD * room, room):
        # Sorting a crowd would take longer than it helps.
        if len(chosen) > size:
            dropped = True
            chosen = chosen[np.argpartition(bound[chosen], size)[:size]]
        if size > room and len(chosen) > 1:
            chosen = chosen[pareto(encoded[chosen], free[chosen])]
    return encoded[chosen], free[chosen], dropped
