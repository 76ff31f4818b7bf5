"""Of all plans that finish by a given time, one with the fewest buckets."""

from __future__ import annotations

import numpy as np

from wingbeat.costs.curve import Floats
from wingbeat.plans.merge.bounds import Rests, Window
from wingbeat.plans.merge.runs import Positions


def fewest(window: Window, rests: Rests, limit: float) -> list[int]:
    """Return the stops of the plan with the fewest buckets that finishes by ``limit``.

    Among those with as few, it is the one that finishes first. There has to be such a plan.

    All beginnings of one bucket, then all of two and so on, each time the Pareto front at each
    position, until one is a whole plan.
    """
    table = window.table
    forced = _forced(window)
    if forced[-1:] == [table.count]:
        return forced
    starts, stops = np.nonzero(window.open.T)
    first = np.searchsorted(starts, np.arange(table.count + 2))
    place, encoded, free = np.zeros(1, dtype=np.int64), np.zeros(1), np.zeros(1)
    layers: list[tuple[Positions, Positions]] = []
    while True:
        counts = first[place + 1] - first[place]
        parent = np.repeat(np.arange(len(place)), counts)
        before = np.cumsum(counts) - counts
        stop = stops[np.arange(len(parent)) + (first[place] - before)[parent]]
        after = encoded[parent] + table.encode[stop, place[parent]]
        sent = np.maximum(table.ready[stop] + after, free[parent])
        sent += table.exchange[stop, place[parent]]
        hope = np.maximum(after + table.least_late[stop], sent + table.least_rest[stop])
        kept = np.flatnonzero(hope <= window.limit)
        kept = kept[_fronts(stop[kept], after[kept], sent[kept])]
        kept = kept[rests.finish_each(stop[kept], after[kept], sent[kept]) <= window.limit]
        layers.append((stop[kept], parent[kept]))
        place, encoded, free = stop[kept], after[kept], sent[kept]
        assert len(place), "no plan finishes by the limit"
        whole = np.flatnonzero((place == table.count) & (free <= limit))
        if len(whole):
            return _walk_back(layers, int(whole[free[whole].argmin()]))


def _forced(window: Window) -> list[int]:
    """Return the stops up to the first position from where there are several ways or none."""
    open_from = np.ascontiguousarray(window.open.T)
    found: list[int] = []
    place = 0
    while place < window.table.count:
        ways = np.flatnonzero(open_from[place])
        if len(ways) != 1:
            break
        place = int(ways[0])
        found.append(place)
    return found


def _fronts(place: Positions, encoded: Floats, free: Floats) -> Positions:
    """Return the indices of pairs that no other pair at the same place is below."""
    order = np.lexsort((free, encoded, place))
    ranks = np.empty(len(order), dtype=np.int64)
    ranks[np.argsort(free, kind="stable")] = np.arange(len(order))
    # Each place's ranks are below those of all places before: running minima begin anew there.
    ranks = ranks[order] - place[order] * len(order)
    falling = ranks[1:] < np.minimum.accumulate(ranks)[:-1]
    kept: Positions = order[np.append(True, falling)[: len(order)]]
    return kept


def _walk_back(layers: list[tuple[Positions, Positions]], index: int) -> list[int]:
    """Return the stops that lead to the label ``index`` of the last layer."""
    found: list[int] = []
    for stop, parent in reversed(layers):
        found.append(int(stop[index]))
        index = int(parent[index])
    return found[::-1]
