"""What tuning of thresholds has found, and why."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from wingbeat.planning.plans.result import HARDLY, counted
from wingbeat.planning.plans.thresholds.cuts import Cuts, divided, levels_of
from wingbeat.planning.plans.thresholds.line import Line
from wingbeat.planning.plans.thresholds.search import Found


@dataclass(frozen=True, slots=True)
class Sample:
    """What was tried: cuts, the median of the iterations' times in seconds, and their number."""

    cuts: Cuts
    seconds: float
    iterations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The end of a tuning.

    Attributes:
        layers: how many layers there are.
        classes: how many classes of flows there are.
        chosen: the best cuts.
        bases: for each cut that was looked for, in order, those that stayed meanwhile.
        samples: in the order in which they were first tried.
        iterations: how many iterations were heard of, also those that do not count.
    """

    layers: int
    classes: int
    chosen: Cuts
    bases: tuple[Cuts, ...]
    samples: tuple[Sample, ...]
    iterations: int

    @property
    def thresholds(self) -> tuple[float, ...]:
        """The levels of urgency that make the chosen cuts."""
        return levels_of(self.chosen, self.layers, self.classes)

    def seconds(self, cuts: Cuts) -> float:
        """Return the median time with cuts that were tried."""
        return next(sample.seconds for sample in self.samples if sample.cuts == cuts)

    def curve(self, base: Cuts) -> dict[int, float]:
        """Return the fitted seconds at each place that was tried beside ``base``."""
        times = {s.cuts: (s.seconds,) * s.iterations for s in self.samples}
        return Line(base, self.layers).expected(times)

    @property
    def spread(self) -> float:
        """How much longer an iteration takes with the slowest than with the fastest, as a share."""
        seconds = [sample.seconds for sample in self.samples]
        return max(seconds) / min(seconds) - 1 if seconds else 0.0

    def explain(self) -> str:
        """Say in one line what was chosen and why."""
        if not self.samples:
            return f"nothing to tune: {counted(self.layers, 'layer')}, and classes need two"
        tried = counted(len(self.samples), "division")
        head = f"tuned thresholds in {counted(self.iterations, 'iteration')}, {tried} tried: "
        chosen = f"{head}{self.named()}, {1e3 * self.seconds(self.chosen):.4g} ms an iteration"
        if self.spread < HARDLY:
            share = f"{100 * self.spread:.1f}%"
            return f"{chosen}, but none matters here: all tried are within {share} of each other"
        one = self.seconds(())
        return f"{chosen}, {1e3 * one:.4g} ms with all in one class"

    def named(self) -> str:
        """Name the chosen thresholds, and how many layers each class has."""
        if not self.chosen:
            return "all in one class"
        sizes = divided(self.chosen, self.layers)
        return f"{written(self.thresholds)} ({sizes} of {counted(self.layers, 'layer')})"


def result_of(found: Found, layers: int, classes: int, iterations: int) -> Result:
    """Sum up what a search has found."""
    return Result(
        layers=layers,
        classes=classes,
        chosen=found.cuts,
        bases=tuple(line.base for line in found.lines),
        samples=tuple(
            Sample(cuts, statistics.median(seconds), len(seconds))
            for cuts, seconds in found.times.items()
        ),
        iterations=iterations,
    )


def nothing(layers: int, classes: int) -> Result:
    """Return what there is to say where one layer is all there is."""
    return Result(layers=layers, classes=classes, chosen=(), bases=(), samples=(), iterations=0)


def written(levels: tuple[float, ...]) -> str:
    """Write thresholds as the command line has them.

    >>> written((0.8, 0.35))
    '0.8+0.35'
    """
    return "+".join(f"{level:.4g}" for level in levels)
