"""What the rest of a backward pass takes at least, so that a search need not look everywhere.

Of a beginning of a plan only two numbers matter for what follows: ``encoded``, the seconds spent
on encoding so far, and ``free``, when the links will be free. Of the rest of a plan only two
matter as well: ``rest``, the seconds its exchanges take, and ``late``, when its last exchange
would end if the links were always free before it and nothing had been encoded. Then

    finish_s = max(encoded + late, free + rest)

and a bucket in front of a rest, encoded in ``e``, exchanged in ``c``, its last gradient ready at
``r``, makes of ``(late, rest)``: ``(max(r + e + c + rest, e + late), c + rest)``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wingbeat.costs.curve import Floats
from wingbeat.costs.workload import Costs, Workload
from wingbeat.plans.merge.runs import Positions, Runs

SLACK = 1e-11
"""Relative; bounds add up in another order than plans do, and must not cut off by rounding."""


class Table:
    """The costs of all runs, and bounds for what comes before and after each position.

    Attributes:
        count: L, the number of tensors.
        ready: when the last gradient before each stop is ready, float64[L + 1].
        encode: ``[stop, start]``, seconds, infinite where there is no such run, float64[L+1, L+1].
        exchange: the same for the exchange.
        least_encoded, least_free: the least ``encoded`` and ``free`` at each position.
        least_late, least_rest: the least ``late`` and ``rest`` from each position on.
        hope: ``[stop, start]``, a time before which no plan with this run finishes.
        best: a finish that some plan has.
        least: no plan finishes earlier, up to rounding.
    """

    def __init__(self, workload: Workload, costs: Costs) -> None:
        runs = Runs(workload, costs)
        self.count = len(runs)
        self.ready = np.concatenate(([0.0], runs.ready))
        places = np.arange(self.count + 1)
        there = (places < places[:, None]) & (places >= runs.first[:, None])
        stops, starts = np.nonzero(there)
        self.encode = np.full(there.shape, np.inf)
        self.encode[there] = runs.encode(starts, stops)
        self.exchange = np.full(there.shape, np.inf)
        self.exchange[there] = runs.exchange(starts, stops)
        self._bound_rest()
        self._bound_beginnings()
        after = self.least_encoded + self.encode
        sent = np.maximum(self.ready[:, None] + after, self.least_free) + self.exchange
        self.hope = np.maximum(after + self.least_late[:, None], sent + self.least_rest[:, None])
        bounds = (self.least_late[0], self.least_rest[0], self.least_free[-1])
        self.least = max(float(bound) for bound in bounds)

    def _bound_rest(self) -> None:
        # Rows of one start are read here, columns of the table.
        encode, exchange = self.encode.T.copy(), self.exchange.T.copy()
        late, rest = np.zeros(self.count + 1), np.zeros(self.count + 1)
        for start in range(self.count - 1, -1, -1):
            after = encode[start, start + 1 :]
            sent = exchange[start, start + 1 :] + rest[start + 1 :]
            rest[start] = sent.min()
            sent += after
            sent += self.ready[start + 1 :]
            late[start] = np.maximum(sent, after + late[start + 1 :]).min()
        self.least_late, self.least_rest = late, rest

    def _bound_beginnings(self) -> None:
        """Bound them, and follow at each position the most hopeful one for a good plan."""
        # Row 0 has each least by itself, row 1 a beginning that there is.
        encoded, free = np.zeros((2, self.count + 1)), np.zeros((2, self.count + 1))
        for stop in range(1, self.count + 1):
            after = encoded[:, :stop] + self.encode[stop, :stop]
            sent = np.maximum(self.ready[stop] + after, free[:, :stop])
            sent += self.exchange[stop, :stop]
            hope = np.maximum(after[1] + self.least_late[stop], sent[1] + self.least_rest[stop])
            chosen = hope.argmin()
            encoded[0, stop], free[0, stop] = after[0].min(), sent[0].min()
            encoded[1, stop], free[1, stop] = after[1, chosen], sent[1, chosen]
        self.least_encoded, self.least_free = encoded[0], free[0]
        self.best = float(free[1, self.count])


class Window:
    """A table without the runs that only plans later than a limit have.

    Attributes:
        table: where it comes from.
        limit: finish, with a little to spare for rounding.
        open: ``[stop, start]``, whether the run is left.
        encode, exchange: as the table's, infinite for what is left out too.
        first, last: for each stop, the least start that is left and the greatest, plus 1, int.
    """

    def __init__(self, table: Table, finish: float) -> None:
        self.table = table
        self.limit = finish * (1.0 + SLACK)
        self.open: NDArray[np.bool_] = table.hope <= self.limit
        self.encode = np.where(self.open, table.encode, np.inf)
        self.exchange = np.where(self.open, table.exchange, np.inf)
        self.first, self.last = _ends(self.open)


def pareto(first: Floats, second: Floats) -> Positions:
    """Return the indices of pairs that no other is below, ``first`` rising; of equal ones, one."""
    order = np.lexsort((second, first))
    ordered = second[order]
    kept = np.append(True, ordered[1:] < np.minimum.accumulate(ordered)[:-1])
    chosen: Positions = order[kept[: len(order)]]
    return chosen


def _ends(rows: NDArray[np.bool_]) -> tuple[list[int], list[int]]:
    """Return the first true column of each row and the last, plus 1; 0 and 0 if there is none."""
    some = rows.any(axis=1)
    last = rows.shape[1] - rows[:, ::-1].argmax(axis=1)
    return np.where(some, rows.argmax(axis=1), 0).tolist(), np.where(some, last, 0).tolist()


class Rests:
    """For each position, pairs (late, rest) such that no rest of a plan is below all of them.

    With enough of them they are the Pareto front of all rests that can still finish by the
    window's limit. With fewer, neighbours on the front are replaced by the corner below them.

    Args:
        window: costs, bounds and the limit.
        width: how many pairs are kept for each position at most.
    """

    def __init__(self, window: Window, width: int) -> None:
        self._width = width
        count = window.table.count
        # An infinite column stands before each front's late and behind its rest.
        shape = (count + 1, width + 1)
        self._late, self._rest = np.full(shape, np.inf), np.full(shape, np.inf)
        self._kept = [0] * count + [1]
        self._late[-1, 1] = self._rest[-1, 0] = 0.0
        encode, exchange = window.encode.T.copy(), window.exchange.T.copy()
        first, last = _ends(window.open.T)
        for start in range(count - 1, -1, -1):
            stops = slice(first[start], last[start])
            width = max(self._kept[stops], default=0)
            if width:
                self._add(window, start, stops, width, encode[start, stops], exchange[start, stops])

    def _add(
        self, window: Window, start: int, stops: slice, width: int, encode: Floats, exchange: Floats
    ) -> None:
        table = window.table
        rest = exchange[:, None] + self._rest[stops, :width]
        late = rest + (table.ready[stops] + encode)[:, None]
        np.maximum(late, encode[:, None] + self._late[stops, 1 : width + 1], out=late)
        hopeful = late <= window.limit - table.least_encoded[start]
        hopeful &= rest <= window.limit - table.least_free[start]
        late, rest = late[hopeful], rest[hopeful]
        if len(rest):
            self._keep(start, late, rest)

    def _keep(self, start: int, late: Floats, rest: Floats) -> None:
        least, most = rest.min(), rest.max()
        # Divided first: a reciprocal of the least differences there are would be infinite.
        share = (rest - least) / (most - least) if most > least else np.zeros(len(rest))
        bins = (share * (self._width - 1e-6)).astype(np.int64)
        lates, rests = np.full(self._width, np.inf), np.full(self._width, np.inf)
        np.minimum.at(lates, bins, late)
        np.minimum.at(rests, bins, rest)
        falling = np.append(True, lates[1:] < np.minimum.accumulate(lates)[:-1])
        kept = int(falling.sum())
        self._late[start, 1 : kept + 1], self._rest[start, :kept] = lates[falling], rests[falling]
        self._kept[start] = kept

    @property
    def least(self) -> float:
        """No plan within the limit finishes earlier; infinite if there is none."""
        return float(self.finish(0, np.zeros(1), np.zeros(1))[0])

    def finish(self, place: int, encoded: Floats, free: Floats) -> Floats:
        """Return the least finish of plans with such beginnings up to ``place``, float64[n]."""
        kept = self._kept[place]
        late, rest = self._late[place], self._rest[place]
        # Along the front late falls and rest rises: the best is where one overtakes the other.
        found = np.searchsorted(rest[:kept] - late[1 : kept + 1], encoded - free)
        bound: Floats = np.minimum(free + rest[found], encoded + late[found])
        return bound

    def finish_each(self, places: Positions, encoded: Floats, free: Floats) -> Floats:
        """Do the same where each beginning has a place of its own, int64[n]."""
        width = max((self._kept[place] for place in set(places.tolist())), default=0)
        late, rest = self._late[places, 1 : width + 1], self._rest[places, :width]
        ends = np.maximum(encoded[:, None] + late, free[:, None] + rest)
        bound: Floats = ends.min(axis=1, initial=np.inf)
        return bound
