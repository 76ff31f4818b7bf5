"""Thresholds in virtual time: the effect of each, and the choice of the tuner of real runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache

from wingbeat.errors import UsageError
from wingbeat.methods.parameter_server.options import Servers
from wingbeat.parts.strategy import Strategy
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


class Thresholds:
    """Iteration times of a strategy with servers, by the thresholds between its classes.

    Each division is simulated once.

    Args:
        model: layers and their times.
        strategy: with servers; the number of its classes matters, its thresholds do not.
        workers: number of workers.
        links: network interfaces.
        work: cost of communication in processor time.
        iterations: iterations of each run; the first does not count.

    Attributes:
        layers: number of layers; 1 if all are one bucket.
        classes: number of classes.

    Raises:
        UsageError: the strategy has no servers, or no classes that thresholds divide.
    """

    def __init__(
        self,
        model: Model,
        strategy: Strategy,
        workers: int,
        links: Links,
        *,
        work: Work | None = None,
        iterations: int = 3,
    ) -> None:
        servers = strategy.exchange
        if not isinstance(servers, Servers) or not servers.levels:
            raise UsageError(
                "simulator.Thresholds(): no thresholds divide the classes of this strategy; use "
                "Geryon() or another ParameterServer with classes=2 or more"
            )
        buckets = buckets_of(model, strategy.plan.fusion())
        self.layers = buckets.places.layers if len(buckets.forward) > 1 else 1
        self.classes = servers.classes

        def simulated(cuts: Cuts) -> float:
            levels = thresholds_from_cuts(cuts, self.layers, self.classes)
            own = replace(strategy, exchange=replace(servers, threshold=levels, file=""))
            run = simulate(model, own, workers, links, work=work, iterations=iterations)
            return run.median_s

        self._simulated = cache(simulated)

    def seconds(self, thresholds: Sequence[float]) -> float:
        """Return the median iteration in seconds with these thresholds."""
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
        """Return the choice of a real run's tuner for these times, which have no noise."""
        if self.layers < 2:
            return untuned(self.layers, self.classes)
        start = thresholds_from_cuts((), self.layers, self.classes)
        trial = threshold_trial(self.layers, start, steps=1, rank=0, size=1)
        seconds = 0.0
        while not trial.done:
            trial.process_rows([trial.report(seconds)])
            seconds = self._simulated(trial.candidate)
        assert trial.result is not None
        return trial.result
