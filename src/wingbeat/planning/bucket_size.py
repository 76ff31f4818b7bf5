"""Tuning of the bucket size (DeAR, section IV-B): result, search and trial.

All searches use the logarithm of the size. The latency of all buckets doubles as the size halves,
and the wait for a bucket to fill doubles with the size: as much may change from 1 to 2 MB as from
50 to 100. Evenly spaced sizes would neglect small ones.
"""

from __future__ import annotations

import functools
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from wingbeat.errors import UsageError
from wingbeat.observe.log import log
from wingbeat.planning.files import check_range
from wingbeat.planning.search_space import LEAST_THROUGHPUT, Sample, Setting, size_at
from wingbeat.planning.trials import Blocks, Encoding, LedTrial, Search
from wingbeat.types import Tuning

WARMUP = 2
"""Iterations after each change that do not count, as new buffers are touched for the first time."""

SEARCHES = ("bo", "random", "grid")

SEED = 25
"""Seed of random search, for reproducible runs."""

SNAP = 0.02
"""Relative distance to an end of the range below which a size is rounded to it."""

NEGLIGIBLE = 0.02
"""Relative difference of throughput below which it is noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSizeResult:
    """The result of tuning the bucket size.

    ``expected`` is the throughput that all samples together predict for the size of each; the
    chosen size has the highest. If all sizes make the same plan, ``buckets`` is the number of its
    buckets, nothing was measured, and ``samples``, ``expected`` and ``decision_s`` are empty;
    otherwise it is 0. ``chosen_topology`` is empty where topologies were not tuned.

    Raises:
        UsageError: a value is out of range, or values contradict each other.
    """

    kind: ClassVar[str] = "bucket size"
    search: str
    low_bytes: int
    high_bytes: int
    steps: int
    samples: tuple[Sample, ...]
    expected: tuple[float, ...]
    chosen_bytes: int
    decision_s: tuple[float, ...]
    buckets: int = 0
    chosen_topology: str = ""

    def __post_init__(self) -> None:
        if self.search not in SEARCHES:
            raise UsageError(f"search is {self.search!r}; allowed: {', '.join(SEARCHES)}")
        check_range("low_bytes", (self.low_bytes,), 1)
        check_range("high_bytes", (self.high_bytes,), self.low_bytes)
        check_range("steps", (self.steps,), 1)
        check_range("expected", self.expected, LEAST_THROUGHPUT, 1e12)
        check_range("chosen_bytes", (self.chosen_bytes,), 1)
        check_range("decision_s", self.decision_s, 0)
        check_range("buckets", (self.buckets,), 0)
        lengths = {len(self.samples), len(self.expected), len(self.decision_s)}
        if len(lengths) != 1 or bool(self.samples) == bool(self.buckets):
            raise UsageError("samples, expected and decision_s need one value for each sample")
        if self.samples and self._chosen not in self._settings:
            raise UsageError(f"chosen_bytes is {self.chosen_bytes}; allowed: the size of a sample")

    @property
    def _settings(self) -> list[Setting]:
        return [(sample.bucket_bytes, sample.topology) for sample in self.samples]

    @property
    def _chosen(self) -> Setting:
        return self.chosen_bytes, self.chosen_topology

    @property
    def start_bytes(self) -> int:
        """The size of the first sample."""
        return self.samples[0].bucket_bytes if self.samples else self.chosen_bytes

    @property
    def chosen_index(self) -> int:
        """Index of the first sample with the chosen size and topology."""
        return self._settings.index(self._chosen)

    @property
    def spread(self) -> float:
        """Expected throughput of the fastest size over that of the slowest, minus 1."""
        return max(self.expected) / min(self.expected) - 1 if self.expected else 0.0

    @property
    def matters(self) -> bool:
        """Whether sizes differ by more than noise."""
        several = len(set(self._settings)) > 1
        return bool(self.samples) and (not several or self.spread >= NEGLIGIBLE)

    @property
    def gain(self) -> float:
        """Expected throughput with the chosen size over that with the start."""
        return self.expected[self.chosen_index] / self.expected[0]

    def explain(self) -> str:
        """Return the choice and its reason in one line."""
        if not self.samples:
            return f"nothing to tune: {self.explain_single_plan()}"
        trials, steps = counted(len(self.samples), "trial"), counted(self.steps, "iteration")
        head = f"tuned buckets in {trials} of {steps} ({self.search}): "
        cost = f"a decision took up to {1e3 * max(self.decision_s):.1f} ms"
        chosen = format_setting(*self._chosen)
        if not self.matters:
            return f"{head}{chosen}, but {self.explain_no_difference()}; {cost}"
        if self.chosen_index == 0:
            return (
                f"{head}{chosen}, as at the start: of the sizes tried, none "
                f"is expected to be faster; {cost}"
            )
        start = format_setting(*self._settings[0])
        return (
            f"{head}{chosen}, {self.gain:.2f}x the throughput of the start ({start}): "
            f"of the sizes tried, the one expected to be fastest; {cost}"
        )

    def explain_single_plan(self) -> str:
        """Return that all sizes make the same plan."""
        low, high = format_mb(self.low_bytes), format_mb(self.high_bytes)
        return (
            f"for this model bucket sizes from {low} to {high} MB are all one plan, "
            f"{counted(self.buckets, 'bucket')}"
        )

    def explain_no_difference(self) -> str:
        """Return that all sizes are equally fast."""
        share = f"{100 * self.spread:.1f}%"
        return f"no size matters here: those tried are within {share} of each other"


def untuned(tuning: Tuning, start_bytes: int, buckets: int) -> BucketSizeResult:
    """Return the result where all sizes make the same plan, of ``buckets`` buckets."""
    return BucketSizeResult(
        search=tuning.search,
        low_bytes=tuning.low_bytes,
        high_bytes=tuning.high_bytes,
        steps=tuning.steps,
        samples=(),
        expected=(),
        chosen_bytes=start_bytes,
        decision_s=(),
        buckets=buckets,
    )


# -- search --------------------------------------------------------------------------------------


def suggest(tuning: Tuning, samples: Sequence[Sample]) -> Setting:
    """Return the bucket size in bytes and the topology to measure next; deterministic.

    With less than two topologies only sizes are searched. Bayesian optimization searches both
    together; in the other searches topologies take turns. There is at least one sample, and the
    first is of the start.
    """
    several = tuning.topologies
    fixed = tuning.low_bytes >= tuning.high_bytes
    if len(several) > 1 and tuning.search == "bo" and not fixed:
        from wingbeat.planning import bayes  # imports scipy and scikit-learn

        size, topology = bayes.suggest_among(tuning, samples)
        return _snap(tuning, size), topology
    topology = several[len(samples) % len(several)] if len(several) > 1 else samples[0].topology
    return (tuning.low_bytes if fixed else _snap(tuning, _suggest_size(tuning, samples))), topology


def _suggest_size(tuning: Tuning, samples: Sequence[Sample]) -> int:
    if tuning.search == "random":
        draws = random.Random(SEED)
        return size_at(tuning, [draws.random() for _ in samples][-1])
    if tuning.search == "grid":
        return _grid(tuning, len(samples), samples[0].bucket_bytes)
    from wingbeat.planning import bayes  # imports scipy and scikit-learn

    return bayes.suggest(tuning, samples)


def _grid(tuning: Tuning, count: int, start: int) -> int:
    """Ascend the grid; the measured start replaces the nearest point."""
    last = max(tuning.trials - 1, 1)
    points = [size_at(tuning, i / last) for i in range(last + 1)]
    points.remove(min(points, key=lambda size: abs(math.log(size / start))))
    return points[(count - 1) % len(points)]


def _snap(tuning: Tuning, size: int) -> int:
    # Random draws are never exactly an end, where a bucket may hold the whole model.
    near = (end for end in (tuning.high_bytes, tuning.low_bytes) if abs(size / end - 1) < SNAP)
    return next(near, size)


def choose(samples: Sequence[Sample]) -> tuple[int, tuple[float, ...]]:
    """Return the index of the best sample, and the expected throughput of each.

    The best has the highest posterior mean in every search, because the highest of noisy
    measurements is biased upwards. Searches differ only in the sizes that they measure.
    """
    from wingbeat.planning import bayes  # imports scipy and scikit-learn

    sizes, topologies = [s.bucket_bytes for s in samples], [s.topology for s in samples]
    mean, _ = bayes.posterior(samples, sizes, topologies)
    # The mean may extrapolate below 0 between samples of very different throughput.
    return int(mean.argmax()), tuple(max(float(value), LEAST_THROUGHPUT) for value in mean)


# -- trial ---------------------------------------------------------------------------------------


def bucket_size_trial(
    tuning: Tuning, start_bytes: int, rank: int, size: int, topology: str = ""
) -> LedTrial[Setting, BucketSizeResult]:
    """Return a trial of bucket sizes, and of topologies if there are several.

    The first block measures the start, which may lie outside the range. After ``tuning.trials``
    blocks the best measured size is chosen.
    """
    names = tuning.topologies or (topology,)
    return LedTrial(
        _search(tuning, (start_bytes, topology)),
        Blocks(
            name="bucket tuning",
            warmup=WARMUP,
            iterations=tuning.steps,
            combine=lambda seconds: statistics.fmean(1.0 / each for each in seconds),
        ),
        rank,
        size,
        start=(start_bytes, topology),
        encoding=Encoding(
            lambda setting: [float(setting[0]), float(names.index(setting[1]))],
            functools.partial(_decode, tuning, start_bytes, names),
        ),
        decisions=(tuning.trials, tuning.trials),
    )


def _decode(tuning: Tuning, start: int, names: Sequence[str], numbers: list[float]) -> Setting:
    nbytes, index = numbers
    low, high = tuning.low_bytes, tuning.high_bytes
    if nbytes != int(nbytes) or not (low <= nbytes <= high or nbytes == start):
        raise ValueError(f"the size has to be the start, {start} bytes, or {low} to {high}")
    if index not in range(len(names)):
        raise ValueError(f"the topology has to be 0 to {len(names) - 1}, of {names!r}")
    return int(nbytes), names[int(index)]


def _search(tuning: Tuning, start: Setting) -> Search[Setting, BucketSizeResult]:
    choose([Sample(start[0], 1.0)])  # imports the libraries during the warm-up
    samples: list[Sample] = []
    decision_s: list[float] = []
    expected: tuple[float, ...] = ()
    current = start
    while len(samples) < tuning.trials:
        # An evaluation or a checkpoint may interrupt single iterations.
        throughput = statistics.median((yield current))
        samples.append(Sample(current[0], throughput, current[1]))
        begin = time.perf_counter()
        if len(samples) == tuning.trials:
            best, expected = choose(samples)
            following = samples[best].bucket_bytes, samples[best].topology
        else:
            following = suggest(tuning, samples)
        decision_s.append(time.perf_counter() - begin)
        _log_sample(tuning, samples, following)
        current = following
    result = BucketSizeResult(
        search=tuning.search,
        low_bytes=tuning.low_bytes,
        high_bytes=tuning.high_bytes,
        steps=tuning.steps,
        samples=tuple(samples),
        expected=expected,
        chosen_bytes=current[0],
        decision_s=tuple(decision_s),
        chosen_topology=current[1],
    )
    log.info("%s", result.explain())
    return current, result


def _log_sample(tuning: Tuning, samples: Sequence[Sample], following: Setting) -> None:
    now, first = samples[-1], samples[0]
    than = ""
    if len(samples) > 1:
        than = f" ({now.iterations_per_s / first.iterations_per_s:.2f}x the start)"
    after = f"; next {format_setting(*following)}" if len(samples) < tuning.trials else ""
    log.info(
        "bucket tuning, trial %d of %d: %s, %.4g iterations/s%s%s",
        len(samples),
        tuning.trials,
        format_setting(now.bucket_bytes, now.topology),
        now.iterations_per_s,
        than,
        after,
    )


# -- text ----------------------------------------------------------------------------------------


def format_setting(nbytes: float, topology: str) -> str:
    """Format a size, and the topology if there is one.

    >>> format_setting(25 * 2**20, ""), format_setting(25 * 2**20, "mesh")
    ('25 MB', '25 MB along mesh')
    """
    return f"{format_mb(nbytes)} MB" + (f" along {topology}" if topology else "")


def format_mb(nbytes: float) -> str:
    """Format a size in MB (2**20 bytes) with three digits.

    >>> [format_mb(mb * 2**20) for mb in (0.05, 6.2041, 25, 4096)]
    ['0.05', '6.2', '25', '4096']
    """
    mb = nbytes / 2**20
    return f"{mb:.0f}" if mb >= 100 else f"{mb:.3g}"


def counted(number: int, noun: str) -> str:
    """Format a number with its noun.

    >>> [counted(1, "trial"), counted(10, "trial")]
    ['1 trial', '10 trials']
    """
    return f"{number} {noun}" + ("" if number == 1 else "s")
