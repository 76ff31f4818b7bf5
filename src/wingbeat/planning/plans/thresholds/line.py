"""One cut that is looked for while the others stay: what was tried, and what it makes likely."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from wingbeat.planning.plans.thresholds.cuts import Cuts
from wingbeat.planning.plans.thresholds.valley import valley

FRONT, BACK = 5, 3
"""How many places are tried first in the first half of the order of forward, and in the second."""

Times = Mapping[Cuts, Sequence[float]]
"""Seconds of the iterations with each of the cuts that were tried."""


@dataclass(frozen=True, slots=True)
class Line:
    """All cuts that add one to those that are known already, or none.

    Attributes:
        base: the cuts that are known.
        layers: how many layers there are.
    """

    base: Cuts
    layers: int

    def at(self, place: int) -> Cuts:
        """Return the cuts with one more before ``place``; the base if it adds nothing."""
        return tuple(sorted({*self.base, place} - {0}))

    def tried(self, times: Times) -> list[int]:
        """Return the places that were tried; the base counts wherever it is met."""
        return [place for place in range(self.layers) if self.at(place) in times]

    def spread(self) -> list[int]:
        """Return the places to begin with.

        Closer to each other towards the front: what is gained there is that forward begins sooner,
        for which few layers are enough. Behind the middle evenly, for the first cut, or one place
        behind the cuts that stay.
        """
        last = self.layers - 1
        half = max(last // 2, 1)
        front = {round(half ** (i / (FRONT - 1))) for i in range(FRONT)}
        if self.base:
            return sorted({*front, (self.base[-1] + self.layers) // 2})
        back = {last - round(i * (last - half) / BACK) for i in range(BACK)}
        return sorted({0, *front, *back} - {self.layers})

    def expected(self, times: Times) -> dict[int, float]:
        """Return the fitted time of each place that was tried, in seconds.

        A cut beside another that stays makes one valley on each side of it, so each part of the
        line between two that stay has a curve of its own.
        """
        fitted: dict[int, float] = {}
        for part in self.parts(times):
            medians = [statistics.median(times[self.at(place)]) for place in part]
            counts = [float(len(times[self.at(place)])) for place in part]
            for place, value in zip(part, valley(medians, counts), strict=True):
                fitted[place] = value
        for place in fitted:
            if self.base and self.at(place) == self.base:  # two curves meet there
                fitted[place] = self._median(place, times)
        return fitted

    def parts(self, times: Times) -> Iterator[list[int]]:
        """Yield the places tried from each cut that stays to the next, both ends among them."""
        tried = self.tried(times)
        ends = [0, *self.base, self.layers]
        for low, high in itertools.pairwise(ends):
            part = [place for place in tried if low <= place <= high]
            if part:
                yield part

    def ranked(self, times: Times) -> list[int]:
        """Return the places that were tried, that of the least expected time first."""
        expected = self.expected(times)
        return sorted(
            expected, key=lambda place: (expected[place], self._median(place, times), place)
        )

    def between(self, times: Times) -> int | None:
        """Return the place to try next: in the middle of the wider gap beside the best one.

        Of two that are as wide, the one that ends at the faster place; beside the next best if the
        best has no gaps left; None if there are none.
        """
        ranked, tried = self.ranked(times), self.tried(times)
        for place in ranked:
            below = max((other for other in tried if other < place), default=place)
            above = min((other for other in tried if other > place), default=place)
            gaps = [(place - below, -ranked.index(below), below)]
            gaps.append((above - place, -ranked.index(above), place))
            width, _, low = max(gaps)
            if width > 1:
                return low + width // 2
        return None

    def _median(self, place: int, times: Times) -> float:
        return statistics.median(times[self.at(place)])
