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

from wingbeat.costs.curve import Floats
from wingbeat.costs.workload import Costs, Workload
from wingbeat.plans.merge.runs import Positions as Places
from wingbeat.plans.merge.runs import Runs

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
        best: a finish that some plan has; `tighten` lowers it.
        least: no plan finishes earlier, up to rounding; `Rests` raises it.
        open: ``[stop, start]``, whether a plan with this run can finish by ``best``.
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
        # The same with the rows of one start next to each other.
        self.encode_from = np.ascontiguousarray(self.encode.T)
        self.exchange_from = np.ascontiguousarray(self.exchange.T)
        self._bound_rest()
        self._bound_beginnings()
        self.open = there
        self.best = np.inf
        self.least = max(
            float(bound) for bound in (self.least_late[0], self.least_rest[0], self.least_free[-1])
        )
        self.tighten(self._one_beginning_each())

    def _bound_rest(self) -> None:
        late, rest = np.zeros(self.count + 1), np.zeros(self.count + 1)
        for start in range(self.count - 1, -1, -1):
            stops = slice(start + 1, None)
            encode = self.encode_from[start, stops]
            exchange = self.exchange_from[start, stops] + rest[stops]
            rest[start] = exchange.min()
            late[start] = np.maximum(
                self.ready[stops] + encode + exchange, encode + late[stops]
            ).min()
        self.least_late, self.least_rest = late, rest

    def _bound_beginnings(self) -> None:
        encoded, free = np.zeros(self.count + 1), np.zeros(self.count + 1)
        for stop in range(1, self.count + 1):
            after = encoded[:stop] + self.encode[stop, :stop]
            encoded[stop] = after.min()
            begin = np.maximum(self.ready[stop] + after, free[:stop])
            free[stop] = (begin + self.exchange[stop, :stop]).min()
        self.least_encoded, self.least_free = encoded, free

    def _one_beginning_each(self) -> float:
        """Return the finish of a good plan: at each position only the most hopeful beginning."""
        encoded, free = np.zeros(self.count + 1), np.zeros(self.count + 1)
        for stop in range(1, self.count + 1):
            after = encoded[:stop] + self.encode[stop, :stop]
            sent = np.maximum(self.ready[stop] + after, free[:stop]) + self.exchange[stop, :stop]
            hope = np.maximum(after + self.least_late[stop], sent + self.least_rest[stop])
            chosen = hope.argmin()
            encoded[stop], free[stop] = after[chosen], sent[chosen]
        return float(free[self.count])

    def after(
        self, stop: int, starts: Places, encoded: Floats, free: Floats
    ) -> tuple[Floats, Floats]:
        """Return (encoded, free) at ``stop`` where those are by position what was before."""
        after = encoded[starts] + self.encode[stop, starts]
        sent = np.maximum(self.ready[stop] + after, free[starts]) + self.exchange[stop, starts]
        return after, sent

    def tighten(self, finish: float) -> None:
        """Take note of a plan that finishes then, and close runs that only later plans have."""
        if finish >= self.best:
            return
        self.best = finish
        after = self.least_encoded + self.encode
        sent = np.maximum(self.ready[:, None] + after, self.least_free) + self.exchange
        hope = np.maximum(after + self.least_late[:, None], sent + self.least_rest[:, None])
        self.open &= hope <= self.limit

    @property
    def limit(self) -> float:
        """``best`` with a little to spare for rounding."""
        return self.best * (1.0 + SLACK)


class Rests:
    """For each position, pairs (late, rest) such that no rest of a plan is below all of them.

    With enough of them they are the Pareto front of all rests that can still finish by the
    table's ``best``. With fewer, neighbours on the front are replaced by the corner below them.

    Args:
        table: costs and bounds.
        width: how many pairs are kept for each position at most.
    """

    def __init__(self, table: Table, width: int) -> None:
        self.table, self.width = table, width
        shape = (table.count + 1, width)
        self._late, self._rest = np.full(shape, np.inf), np.full(shape, np.inf)
        self._kept = np.zeros(table.count + 1, dtype=np.int64)
        self._late[-1, 0] = self._rest[-1, 0] = 0.0
        self._kept[-1] = 1
        open_from = np.ascontiguousarray(table.open.T)
        for start in range(table.count - 1, -1, -1):
            stops = np.flatnonzero(open_from[start])
            if len(stops):
                self._keep(start, *self._candidates(start, stops))
        table.least = max(table.least, float(self.finish(0, np.zeros(1), np.zeros(1))[0]))

    def _candidates(self, start: int, stops: Places) -> tuple[Floats, Floats]:
        table = self.table
        width = int(self._kept[stops].max())
        encode = table.encode_from[start, stops][:, None]
        rest = table.exchange_from[start, stops][:, None] + self._rest[stops, :width]
        late = np.maximum(
            (table.ready[stops][:, None] + encode) + rest, encode + self._late[stops, :width]
        )
        hopeful = late <= table.limit - table.least_encoded[start]
        hopeful &= rest <= table.limit - table.least_free[start]
        return late[hopeful], rest[hopeful]

    def _keep(self, start: int, late: Floats, rest: Floats) -> None:
        if not len(rest):
            return
        least, most = rest.min(), rest.max()
        scale = self.width / (most - least) if most > least else 0.0
        bins = np.minimum((rest - least) * scale, self.width - 1.0).astype(np.int64)
        lates, rests = np.full(self.width, np.inf), np.full(self.width, np.inf)
        np.minimum.at(lates, bins, late)
        np.minimum.at(rests, bins, rest)
        falling = np.append(True, lates[1:] < np.minimum.accumulate(lates)[:-1])
        kept = int(falling.sum())
        self._late[start, :kept], self._rest[start, :kept] = lates[falling], rests[falling]
        self._kept[start] = kept

    def finish(self, place: int, encoded: Floats, free: Floats) -> Floats:
        """Return the least finish of plans with such beginnings up to ``place``, float64[n]."""
        kept = self._kept[place]
        late, rest = self._late[place, :kept], self._rest[place, :kept]
        # Along the front late falls and rest rises: the best is where one overtakes the other.
        found = np.searchsorted(rest - late, encoded - free)
        by_rest = free + np.append(rest, np.inf)[found]
        by_late = encoded + np.append(np.inf, late)[found]
        bound: Floats = np.minimum(by_rest, by_late)
        return bound

    def finish_each(self, places: Places, encoded: Floats, free: Floats) -> Floats:
        """Do the same where each beginning has a place of its own, int64[n]."""
        width = int(np.max(self._kept[places], initial=0))
        late, rest = self._late[places, :width], self._rest[places, :width]
        ends = np.maximum(encoded[:, None] + late, free[:, None] + rest)
        bound: Floats = ends.min(axis=1, initial=np.inf)
        return bound

    def close(self) -> None:
        """Close runs that only plans later than the table's limit have."""
        table = self.table
        for stop in range(1, table.count + 1):
            starts = np.flatnonzero(table.open[stop])
            if len(starts):
                encoded, free = table.after(stop, starts, table.least_encoded, table.least_free)
                late = self.finish(stop, encoded, free) > table.limit
                table.open[stop, starts[late]] = False
