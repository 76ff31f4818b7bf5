"""Thresholds in virtual time: what each would do, and which the tuner of real runs would keep."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache

from wingbeat.errors import UsageError
from wingbeat.planning.thresholds import (
    Cuts,
    ThresholdResult,
    cuts_from_thresholds,
    threshold_trial,
    thresholds_from_cuts,
    untuned,
)
from wingbeat.simulator.cluster import Links, Work
from wingbeat.simulator.model import Model, buckets_of
from wingbeat.simulator.run import simulate
from wingbeat.types import Choices


class Thresholds:
    """Iteration times of a strategy with servers, by what divides its classes.

    Each division is simulated once.

    Args:
        model: layers and their times.
        choices: a strategy's answers; the number of its classes counts, its thresholds do not.
        workers: how many.
        links: what joins them.
        work: what communication costs their processors.
        iterations: of each run; the first does not count.

    Attributes:
        layers: how many layers there are; 1 if all of them are one bucket.
        classes: how many classes.

    Raises:
        UsageError: no servers, or classes that thresholds do not divide.
    """

    def __init__(
        self,
        model: Model,
        choices: Choices,
        workers: int,
        links: Links,
        *,
        work: Work | None = None,
        iterations: int = 3,
    ) -> None:
        serving = choices.servers
        if serving is None or not serving.thresholds:
            raise UsageError(
                "simulator.Thresholds(): no thresholds divide the classes of this strategy; use "
                "Geryon() or another ParameterServer with classes=2 or more"
            )
        buckets = buckets_of(model, choices.fusion)
        self.layers = buckets.places.layers if len(buckets.forward) > 1 else 1
        self.classes = serving.classes

        def simulated(cuts: Cuts) -> float:
            levels = thresholds_from_cuts(cuts, self.layers, self.classes)
            own = replace(choices, servers=replace(serving, thresholds=levels, tuning=None))
            run = simulate(model, own, workers, links, work=work, iterations=iterations)
            return run.median_s

        self._simulated = cache(simulated)

    def seconds(self, thresholds: Sequence[float]) -> float:
        """Return the median iteration with these thresholds."""
        return self._simulated(cuts_from_thresholds(thresholds, self.layers))

    def sweep(self, thresholds: Iterable[float]) -> dict[float, float]:
        """Return the median iteration in seconds for each of several thresholds of two classes."""
        return {level: self.seconds((level,)) for level in thresholds}

    def all_levels(self) -> list[float]:
        """Return one threshold for each division into two classes, the most urgent level first."""
        return [
            level
            for place in range(self.layers)
            for level in thresholds_from_cuts((place,) if place else (), self.layers, 2)
        ]

    def tuned(self) -> ThresholdResult:
        """Return what the tuner of a real run makes of these times, which do not scatter."""
        if self.layers < 2:
            return untuned(self.layers, self.classes)
        start = thresholds_from_cuts((), self.layers, self.classes)
        trial = threshold_trial(self.layers, start, steps=1, rank=0, size=1)
        seconds = 0.0
        while not trial.done:
            trial.take([trial.report(seconds)])
            seconds = self._simulated(trial.candidate)
        assert trial.result is not None
        return trial.result
