"""Tuning of the thresholds between priority classes (Geryon, Wang et al., 2020, section III-C).

The paper uses different thresholds in the first iterations, fits the relationship between iteration
time and threshold, and keeps the threshold of the minimum.

With ``L`` layers the l-th has urgency ``1 - l/L``, so all thresholds between two neighbours make
the same classes. The search space therefore consists of *cuts*: numbers of layers before a change
of class, in the order of forward. Empty classes have no effect, so equal sets of cuts are the same
candidate for any number of classes.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from wingbeat.errors import UsageError
from wingbeat.observe.log import log
from wingbeat.planning.bucket_size import NEGLIGIBLE, counted
from wingbeat.planning.costs import isotonic
from wingbeat.planning.files import check_range
from wingbeat.planning.trials import Blocks, LedTrial, Search

WARMUP = 1
"""Iterations after each change that do not count, as earlier sums may still arrive."""

LAG = 2
"""Iterations from the last counted one until all workers have changed."""

FRONT, BACK = 5, 3
"""Positions measured first in the first half of the order of forward, and in the second."""

REFINEMENTS = (5, 3, 3)
"""Positions measured next to the best ones, for the first cut and those after it."""

CLEAR, REPEATS = 0.008, 16
"""Relative standard error above which the best two are measured again before the search refines
next to the better one, and the most repetitions for each cut."""

FINALISTS = 3
"""Number of the best that are measured again at the end."""

CERTAIN = 0.005
"""Relative standard error of the finalists below which they are not measured again."""

FINAL_ROUNDS = 5
"""Most rounds in which the finalists are measured again."""

Cuts = tuple[int, ...]
"""Rising numbers of layers, above 0 and below all; empty: one class for all layers."""

Times = Mapping[Cuts, Sequence[float]]
"""Seconds of the iterations with each measured set of cuts."""


# -- cuts ----------------------------------------------------------------------------------------


def cuts_from_thresholds(thresholds: Sequence[float], layers: int) -> Cuts:
    """Return the cuts that thresholds make.

    >>> [cuts_from_thresholds(t, n) for t, n in (((0.5,), 4), ((0.9, 0.8), 10), ((0.99, 0.98), 4))]
    [(1,), (1,), ()]
    """
    # Must divide as `urgency_level` of the servers' tables does, so that exact matches agree.
    counts = {
        sum((layers - place) / layers > level for place in range(1, layers + 1))
        for level in thresholds
    }
    return tuple(sorted(counts - {0}))


def thresholds_from_cuts(cuts: Cuts, layers: int, classes: int) -> tuple[float, ...]:
    """Return falling thresholds that make these cuts, midway between two urgencies.

    There are fewer cuts than classes. The most urgent classes may stay empty, so that the least
    urgent layers always have the last class.

    >>> thresholds_from_cuts((2,), 4, 2), thresholds_from_cuts((), 4, 2)
    ((0.375,), (0.875,))
    """
    first = cuts[0] if cuts else 0
    repeats = classes - 1 - len(cuts[1:])
    urgent = [(layers - first - (i + 1) / (repeats + 1)) / layers for i in range(repeats)]
    return (*urgent, *((layers - cut - 0.5) / layers for cut in cuts[1:]))


def valid_cuts(cuts: Sequence[int], layers: int, classes: int) -> bool:
    """Return whether these cuts divide the layers into at most ``classes`` classes."""
    rising = list(cuts) == sorted(set(cuts))
    return rising and len(cuts) < classes and all(0 < cut < layers for cut in cuts)


def format_division(cuts: Cuts, layers: int) -> str:
    """Format the number of layers in each non-empty class, the most urgent first.

    >>> format_division((2, 5), 9)
    '2 + 3 + 4'
    """
    ends = (0, *cuts, layers)
    return " + ".join(str(stop - start) for start, stop in itertools.pairwise(ends))


def format_thresholds(thresholds: Sequence[float]) -> str:
    """Format thresholds as on the command line.

    >>> format_thresholds((0.8, 0.35))
    '0.8+0.35'
    """
    return "+".join(f"{level:.4g}" for level in thresholds)


# -- result --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ThresholdSample:
    """A measured candidate: its cuts, the median iteration in seconds, and their number."""

    cuts: Cuts
    seconds: float
    iterations: int

    def __post_init__(self) -> None:
        check_range("seconds", (self.seconds,), 1e-9, 1e9)
        check_range("iterations", (self.iterations,), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdResult:
    """The result of tuning thresholds.

    ``bases`` are, for each searched cut in order, the cuts that were fixed meanwhile. ``samples``
    are in the order of their first measurement. ``iterations`` includes those that did not count.
    Values that contradict each other are a `UsageError`.
    """

    kind: ClassVar[str] = "thresholds"
    layers: int
    classes: int
    chosen: Cuts
    bases: tuple[Cuts, ...]
    samples: tuple[ThresholdSample, ...]
    iterations: int

    def __post_init__(self) -> None:
        check_range("layers", (self.layers,), 1)
        check_range("classes", (self.classes,), 2)
        check_range("iterations", (self.iterations,), 0)
        measured = [sample.cuts for sample in self.samples]
        for name, classes, several in (
            ("chosen", self.classes, [self.chosen]),
            ("bases", self.classes - 1, self.bases),
            ("samples.cuts", self.classes, measured),
        ):
            for cuts in several:
                if not valid_cuts(cuts, self.layers, classes):
                    raise UsageError(
                        f"{name} is {list(cuts)!r}; allowed: at most {classes - 1} rising whole "
                        f"numbers above 0 and below {self.layers}"
                    )
        if len(set(measured)) != len(measured) or bool(self.samples) != bool(self.bases):
            raise UsageError("samples has to hold each division once, and bases the fixed cuts")
        if measured and not {self.chosen, (), *self.bases} <= set(measured):
            raise UsageError("chosen and bases have to be among the samples, and one class too")

    @property
    def thresholds(self) -> tuple[float, ...]:
        """The thresholds that make the chosen cuts."""
        return thresholds_from_cuts(self.chosen, self.layers, self.classes)

    def seconds(self, cuts: Cuts) -> float:
        """Return the median time with measured cuts."""
        return next(sample.seconds for sample in self.samples if sample.cuts == cuts)

    def curve(self, base: Cuts) -> dict[int, float]:
        """Return the fitted seconds at each measured position in addition to ``base``."""
        times = {s.cuts: (s.seconds,) * s.iterations for s in self.samples}
        return CutAxis(base, self.layers).fitted(times)

    @property
    def spread(self) -> float:
        """Time of the slowest candidate over that of the fastest, minus 1."""
        seconds = [sample.seconds for sample in self.samples]
        return max(seconds) / min(seconds) - 1 if seconds else 0.0

    def explain(self) -> str:
        """Return the choice and its reason in one line."""
        if not self.samples:
            return f"nothing to tune: {counted(self.layers, 'layer')}, and classes need two"
        tried = counted(len(self.samples), "division")
        head = f"tuned thresholds in {counted(self.iterations, 'iteration')}, {tried} tried: "
        ms = 1e3 * self.seconds(self.chosen)
        chosen = f"{head}{self.explain_choice()}, {ms:.4g} ms an iteration"
        if self.spread < NEGLIGIBLE:
            share = f"{100 * self.spread:.1f}%"
            return f"{chosen}, but none matters here: all tried are within {share} of each other"
        return f"{chosen}, {1e3 * self.seconds(()):.4g} ms with all in one class"

    def explain_choice(self) -> str:
        """Return the chosen thresholds, and the number of layers of each class."""
        if not self.chosen:
            return "all in one class"
        division = format_division(self.chosen, self.layers)
        of = counted(self.layers, "layer")
        return f"{format_thresholds(self.thresholds)} ({division} of {of})"


def untuned(layers: int, classes: int) -> ThresholdResult:
    """Return the result where there is a single layer."""
    return ThresholdResult(
        layers=layers, classes=classes, chosen=(), bases=(), samples=(), iterations=0
    )


# -- search --------------------------------------------------------------------------------------


def unimodal_fit(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return the nearest values that fall and then rise, in least squares.

    The paper names no curve. The time is not a parabola: it jumps where a large layer joins the
    urgent class. With too few urgent buckets the first layers wait for others, and with too many
    for each other, so unimodality is the only assumption.

    >>> unimodal_fit([5.0, 3.0, 4.0, 2.0, 6.0], [1.0] * 5)
    [5.0, 3.5, 3.5, 2.0, 6.0]
    """
    best: list[float] = []
    least = math.inf
    # The sides of the minimum are independent of each other.
    for turn in range(len(values) + 1):
        left = isotonic([-value for value in values[:turn]], weights[:turn])
        right = isotonic(values[turn:], weights[turn:])
        fitted = [*(-value for value in left), *right]
        squares = zip(values, fitted, weights, strict=True)
        error = sum(weight * (value - fit) ** 2 for value, fit, weight in squares)
        if error < least:
            least, best = error, fitted
    return best


@dataclass(frozen=True, slots=True)
class CutAxis:
    """The search of one cut of ``layers`` layers while the ``base`` cuts are fixed."""

    base: Cuts
    layers: int

    def at(self, position: int) -> Cuts:
        """Return the cuts with one more before ``position``; the base if it adds nothing."""
        return tuple(sorted({*self.base, position} - {0}))

    def initial(self) -> list[int]:
        """Return the positions to begin with.

        They are denser towards the front: forward begins sooner with a cut there, for which few
        layers are enough. Behind the middle they are evenly spaced for the first cut; for later
        ones there is one position behind the fixed cuts.
        """
        last = self.layers - 1
        half = max(last // 2, 1)
        front = {round(half ** (i / (FRONT - 1))) for i in range(FRONT)}
        if self.base:
            return sorted({*front, (self.base[-1] + self.layers) // 2})
        back = {last - round(i * (last - half) / BACK) for i in range(BACK)}
        return sorted({0, *front, *back} - {self.layers})

    def fitted(self, times: Times) -> dict[int, float]:
        """Return the fitted time of each measured position, in seconds.

        A fixed cut separates two minima, so each interval between fixed cuts has its own curve.
        """
        fitted: dict[int, float] = {}
        measured = [position for position in range(self.layers) if self.at(position) in times]
        for low, high in itertools.pairwise([0, *self.base, self.layers]):
            part = [position for position in measured if low <= position <= high]
            medians = [self._median(position, times) for position in part]
            counts = [float(len(times[self.at(position)])) for position in part]
            fitted |= zip(part, unimodal_fit(medians, counts), strict=True)
        for position in fitted:
            if self.base and self.at(position) == self.base:  # two curves meet there
                fitted[position] = self._median(position, times)
        return fitted

    def ranked(self, times: Times) -> list[int]:
        """Return the measured positions, the least fitted time first."""
        fitted = self.fitted(times)
        return sorted(fitted, key=lambda at: (fitted[at], self._median(at, times), at))

    def ranked_cuts(self, times: Times) -> list[Cuts]:
        """Return the measured cuts, the fastest first."""
        return list(dict.fromkeys(self.at(position) for position in self.ranked(times)))

    def refine(self, times: Times) -> int | None:
        """Return the position to measure next: the middle of the wider gap next to the best one.

        Of two equal gaps, the one that ends at the faster position is used. If the best has no gaps
        left, the next best follows; None if there are no gaps.
        """
        ranked = self.ranked(times)
        for position in ranked:
            below = max((other for other in ranked if other < position), default=position)
            above = min((other for other in ranked if other > position), default=position)
            gaps = [(position - below, -ranked.index(below), below)]
            gaps.append((above - position, -ranked.index(above), position))
            width, _, low = max(gaps)
            if width > 1:
                return low + width // 2
        return None

    def _median(self, position: int, times: Times) -> float:
        return statistics.median(times[self.at(position)])


def search_cuts(layers: int, classes: int) -> Generator[Cuts, Sequence[float], ThresholdResult]:
    """Search the best cuts of ``layers`` layers into ``classes`` classes.

    The generator yields the cuts to measure and is sent the seconds of iterations with them. The
    search is deterministic. The result counts the measured iterations.

    Cuts are searched one after the other: first that of two classes, then one more for each further
    class. For each, a few positions are spread over the order of forward, and more are measured
    next to the best of them, where the time may jump from one layer to the next. At the end the
    best few are measured again in turn, because the least of noisy times is biased; taking turns
    spreads a slowdown of the machine over all of them.
    """
    times: dict[Cuts, list[float]] = {}
    axes: list[CutAxis] = []
    base: Cuts = ()
    for refinements in REFINEMENTS[: classes - 1]:
        axis = CutAxis(base, layers)
        axes.append(axis)
        for position in axis.initial():
            if axis.at(position) not in times:
                times[axis.at(position)] = list((yield axis.at(position)))
        repeats = REPEATS
        while refinements:
            best = axis.ranked_cuts(times)[:2]
            vague = [cuts for cuts in best if relative_error(times, cuts) > CLEAR]
            if vague and repeats:
                repeats -= 1
                times[vague[0]] += yield vague[0]
                continue
            refinements -= 1
            position_between = axis.refine(times)
            if position_between is None:
                break
            times[axis.at(position_between)] = list((yield axis.at(position_between)))
        base = axis.ranked_cuts(times)[0]
    finalists = axes[-1].ranked_cuts(times)[:FINALISTS]
    for _ in range(FINAL_ROUNDS if len(finalists) > 1 else 0):
        if max(relative_error(times, cuts) for cuts in finalists) <= CERTAIN:
            break
        for cuts in finalists:
            times[cuts] += yield cuts
    chosen = next(cuts for cuts in axes[-1].ranked_cuts(times) if cuts in finalists)
    return ThresholdResult(
        layers=layers,
        classes=classes,
        chosen=chosen,
        bases=tuple(axis.base for axis in axes),
        samples=tuple(
            ThresholdSample(cuts, statistics.median(seconds), len(seconds))
            for cuts, seconds in times.items()
        ),
        iterations=sum(map(len, times.values())),
    )


def relative_error(times: Times, cuts: Cuts) -> float:
    """Return the relative standard error of the median of the times with ``cuts``.

    Medians over all candidates estimate the scatter of single iterations, so that an evaluation
    between two iterations does not count.
    """
    medians = {tried: statistics.median(seconds) for tried, seconds in times.items()}
    away = [abs(s / medians[tried] - 1) for tried, seconds in times.items() for s in seconds]
    return 1.25 * 1.48 * statistics.median(away) / math.sqrt(len(times[cuts]))


def max_blocks(layers: int, classes: int) -> int:
    """Return the most blocks of a search under any noise."""
    cuts = sum(min(count, layers) + REPEATS for count in _position_counts(classes))
    return cuts + FINALISTS * FINAL_ROUNDS


def typical_blocks(classes: int) -> int:
    """Return the approximate number of blocks of a search where times vary by 1%."""
    return sum(_position_counts(classes)) + FINALISTS


def max_iterations(layers: int, classes: int, steps: int) -> int:
    """Return the most iterations of a tuning, if every worker measures each of them."""
    return LAG + max_blocks(layers, classes) * (WARMUP + steps + LAG)


def _position_counts(classes: int) -> list[int]:
    """Return the most positions that are measured for each cut."""
    first, *others = REFINEMENTS[: classes - 1]
    return [1 + FRONT + BACK + first, *(FRONT + 1 + refinements for refinements in others)]


# -- trial ---------------------------------------------------------------------------------------


def threshold_trial(
    layers: int, start: Sequence[float], steps: int, rank: int, ranks: Sequence[int]
) -> LedTrial[Cuts, ThresholdResult]:
    """Return a trial of thresholds for two or more layers; its candidates are cuts."""
    classes = len(start) + 1

    def search() -> Search[Cuts, ThresholdResult]:
        result = yield from search_cuts(layers, classes)
        result = replace(result, iterations=trial.exchanges)
        log.info("%s", result.explain())
        return result.chosen, result

    def encode(cuts: Cuts) -> list[float]:
        return [*map(float, cuts), *[0.0] * (classes - 1 - len(cuts))]

    def decode(numbers: list[float]) -> Cuts:
        cuts = tuple(int(cut) for cut in numbers if cut)
        if numbers != encode(cuts) or not valid_cuts(cuts, layers, classes):
            raise ValueError(f"these do not divide {layers} layers")
        return cuts

    blocks = Blocks(
        name="threshold tuning", warmup=WARMUP, iterations=steps, combine=statistics.fmean
    )
    trial = LedTrial(
        search(), blocks, rank, ranks, start=cuts_from_thresholds(start, layers),
        encode=encode, decode=decode, decisions=(1, max_blocks(layers, classes) + 1),
    )  # fmt: skip
    return trial
