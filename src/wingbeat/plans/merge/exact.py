"""The best plan of all, by dynamic programming over Pareto labels."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wingbeat.costs.curve import Floats
from wingbeat.costs.workload import Costs, Workload
from wingbeat.plans.merge.bounds import Rests, Table
from wingbeat.plans.merge.exhaustive import TIE
from wingbeat.plans.merge.fewest import fewest
from wingbeat.plans.merge.runs import plan_of
from wingbeat.types import Plan

WIDTH, ROOM, GROWTH = 32, 16, 4
"""Pairs and beginnings kept for each position in the first round, and how both grow."""
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
    shape), so beginnings that cannot finish by the best plan known are dropped too. Rounds take
    turns: bounds for the rest of a plan from its end (`Rests`), then beginnings from its start, as
    many as ``ROOM`` at each position, the most hopeful. A round that had to drop none for want
    of room has seen everything that matters; otherwise the next one has more room, a better
    plan to beat and so sharper bounds.
    """
    if not len(workload):
        return Plan(())
    table = Table(workload, costs)
    width, room = WIDTH, ROOM
    rests = Rests(table, width)
    while table.best > table.least * (1.0 + TIE):
        rests.close()
        finish, complete = _forward(rests, room)
        table.tighten(finish)
        if complete:
            break
        width, room = width * GROWTH, room * GROWTH
        rests = Rests(table, width)
    rests.close()
    return plan_of(workload, fewest(rests, table.best * (1.0 + TIE)))


def _forward(rests: Rests, room: int) -> tuple[float, bool]:
    """Return the least finish found, and whether no beginning was dropped for want of room."""
    table = rests.table
    labels = _Labels(table)
    complete = True
    for stop in range(1, table.count + 1):
        encoded, free = labels.ending(stop)
        bound = rests.finish(stop, encoded, free)
        chosen = np.flatnonzero(bound <= table.limit)
        if len(chosen) > CROWD * room:
            # Sorting all of them would take longer than it helps.
            complete = False
            chosen = chosen[np.argpartition(bound[chosen], CROWD * room)[: CROWD * room]]
        chosen = chosen[pareto(encoded[chosen], free[chosen])]
        if len(chosen) > room:
            complete = False
            chosen = chosen[np.argpartition(bound[chosen], room)[:room]]
        labels.add(stop, encoded[chosen], free[chosen])
    return labels.finish(), complete


def pareto(encoded: Floats, free: Floats) -> NDArray[np.int64]:
    """Return the indices of pairs that no other pair is below; of equal ones, one."""
    order = np.lexsort((free, encoded))
    sorted_free = free[order]
    kept = np.append(True, sorted_free[1:] < np.minimum.accumulate(sorted_free)[:-1])
    chosen: NDArray[np.int64] = order[kept[: len(order)]]
    return chosen


class _Labels:
    """Beginnings of plans, by the position where they end."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._encoded, self._free = np.zeros(1024), np.zeros(1024)
        self._place = np.zeros(1024, dtype=np.int64)
        self._count = 1
        self._begin = np.zeros(table.count + 2, dtype=np.int64)
        self._begin[1] = 1

    def ending(self, stop: int) -> tuple[Floats, Floats]:
        """Return (encoded, free) of all beginnings with one more bucket, up to ``stop``."""
        table = self._table
        starts = np.flatnonzero(table.open[stop])
        self._begin[stop + 1] = self._count
        if not len(starts):
            return np.zeros(0), np.zeros(0)
        labels = slice(self._begin[starts[0]], self._begin[starts[-1] + 1])
        place = self._place[labels]
        encoded = self._encoded[labels] + table.encode[stop, place]
        sent = np.maximum(table.ready[stop] + encoded, self._free[labels])
        free = sent + table.exchange[stop, place]
        late, rest = table.least_late[stop], table.least_rest[stop]
        hopeful = np.maximum(encoded + late, free + rest) <= table.limit
        return encoded[hopeful], free[hopeful]

    def add(self, place: int, encoded: Floats, free: Floats) -> None:
        """Keep beginnings that end at ``place``; places come in rising order."""
        count = self._count + len(free)
        while count > len(self._free):
            self._encoded = np.concatenate((self._encoded, np.zeros_like(self._encoded)))
            self._free = np.concatenate((self._free, np.zeros_like(self._free)))
            self._place = np.concatenate((self._place, np.zeros_like(self._place)))
        self._encoded[self._count : count] = encoded
        self._free[self._count : count] = free
        self._place[self._count : count] = place
        self._count = count
        self._begin[place + 1] = count

    def finish(self) -> float:
        """Return the least ``free`` of the beginnings that are whole plans; infinite if none."""
        whole = self._free[self._begin[-2] : self._count]
        return float(whole.min(initial=np.inf))
