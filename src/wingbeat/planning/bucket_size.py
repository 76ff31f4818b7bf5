"""Tuning of the bucket size (DeAR, section IV-B): range, result, searches and trial.

All searches use the logarithm of the size. The latency of all buckets doubles as the size halves,
and the wait for a bucket to fill doubles with the size: as much may change from 1 to 2 MB as from
50 to 100. Evenly spaced sizes would neglect small ones.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from wingbeat.errors import UsageError
from wingbeat.observe.log import log
from wingbeat.planning.costs import Floats
from wingbeat.planning.files import check_range
from wingbeat.planning.gaussian_process import GaussianProcess, expected_improvement
from wingbeat.planning.plans import make_plan
from wingbeat.planning.trials import Blocks, LedTrial, Search
from wingbeat.types import Fusion, Plan, TensorSpec, Tuning

WARMUP = 2
"""Iterations after each change that do not count, as new buffers are touched for the first time."""

SEARCHES = ("bo", "random", "grid")

SEED = 25
"""Seed of random search, for reproducible runs."""

SNAP = 0.02
"""Relative distance to an end of the range below which a size is rounded to it."""

NEGLIGIBLE = 0.02
"""Relative difference of throughput below which it is noise."""

LEAST_THROUGHPUT = 1e-12
"""Iterations per second that a valid measurement exceeds."""

_COMPARED_SIZES = 64
"""Number of compared sizes, evenly spaced on a logarithmic scale."""

Setting = tuple[int, str]
"""A bucket size in bytes, and a topology; empty where topologies are not tuned."""

# -- range ---------------------------------------------------------------------------------------


def size_at(tuning: Tuning, share: float) -> int:
    """Return the size at ``share`` (0 to 1) of the range, on a logarithmic scale.

    >>> [size_at(Tuning(search="grid", low_bytes=1, high_bytes=100), s) for s in (0, 0.5, 1)]
    [1, 10, 100]
    """
    low, high = tuning.low_bytes, tuning.high_bytes
    return min(max(round(low * math.pow(high / low, share)), low), high)


def largest_bucket(specs: Sequence[TensorSpec]) -> int:
    """Return the largest total bytes of a dtype and device; larger sizes make the same plan."""
    totals: Counter[str] = Counter()
    for spec in specs:
        totals[spec.kind] += spec.nbytes
    return max([1, *totals.values()])


def clip_range(tuning: Tuning, specs: Sequence[TensorSpec]) -> Tuning:
    """Return the tuning with a range that ends at `largest_bucket`."""
    high = max(tuning.low_bytes, min(tuning.high_bytes, largest_bucket(specs)))
    return replace(tuning, high_bytes=high)


def single_plan(
    fusion: Fusion, tuning: Tuning, specs: Sequence[TensorSpec], order: Sequence[int]
) -> Plan | None:
    """Return the plan that the start and all sizes of the range make; None if there are several."""
    first = make_plan(fusion, specs, order)
    last = _COMPARED_SIZES - 1
    # The ends first: where sizes matter, the smallest and the largest differ.
    for i in sorted(range(_COMPARED_SIZES), key=lambda i: min(i, last - i)):
        size = size_at(tuning, i / last)
        if make_plan(replace(fusion, bucket_bytes=size), specs, order) != first:
            return None
    return first


# -- result --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sample:
    """One block of iterations: mean throughput of all workers, median over the iterations."""

    bucket_bytes: int
    iterations_per_s: float
    topology: str = ""

    def __post_init__(self) -> None:
        check_range("bucket_bytes", (self.bucket_bytes,), 1)
        check_range("iterations_per_s", (self.iterations_per_s,), LEAST_THROUGHPUT, 1e12)


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSizeResult:
    """The result of tuning the bucket size.

    ``expected`` is the throughput that all samples together predict for the size of each; the
    chosen size has the highest. If all sizes make the same plan, ``buckets`` is the number of its
    buckets, nothing was measured, and ``samples``, ``expected`` and ``decision_s`` are empty;
    otherwise it is 0. ``chosen_topology`` is empty where topologies were not tuned. Values that
    contradict each other are a `UsageError`.
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
        if self.samples and (self.chosen_bytes, self.chosen_topology) not in self._settings:
            raise UsageError(f"chosen_bytes is {self.chosen_bytes}; allowed: the size of a sample")

    @property
    def _settings(self) -> list[Setting]:
        return [(sample.bucket_bytes, sample.topology) for sample in self.samples]

    @property
    def start_bytes(self) -> int:
        """The size of the first sample."""
        return self.samples[0].bucket_bytes if self.samples else self.chosen_bytes

    @property
    def chosen_index(self) -> int:
        """Index of the first sample with the chosen size and topology."""
        return self._settings.index((self.chosen_bytes, self.chosen_topology))

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
        chosen = format_setting(self.chosen_bytes, self.chosen_topology)
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

    Bayesian optimization searches both together; in the other searches topologies take turns. There
    is at least one sample, and the first is of the start.
    """
    count, names = len(samples), tuning.topologies or (samples[0].topology,)
    turn = names[count % len(names)] if len(names) > 1 else samples[0].topology
    if tuning.low_bytes >= tuning.high_bytes:
        return tuning.low_bytes, turn
    if tuning.search == "bo":
        size, turn = _most_expected_improvement(tuning, samples, names)
    elif tuning.search == "random":
        draws = random.Random(SEED)
        size = size_at(tuning, [draws.random() for _ in samples][-1])
    else:  # ascend the grid; the measured start replaces the nearest point
        last = max(tuning.trials - 1, 1)
        points = [size_at(tuning, i / last) for i in range(last + 1)]
        start = samples[0].bucket_bytes
        points.remove(min(points, key=lambda size: abs(math.log(size / start))))
        size = points[(count - 1) % len(points)]
    ends = (end for end in (tuning.high_bytes, tuning.low_bytes) if abs(size / end - 1) < SNAP)
    return next(ends, size), turn


def choose(samples: Sequence[Sample]) -> tuple[int, tuple[float, ...]]:
    """Return the index of the best sample, and the expected throughput of each.

    The best has the highest posterior mean in every search, because the highest of noisy
    measurements is biased upwards. Searches differ only in the sizes that they measure.
    """
    sizes, topologies = [s.bucket_bytes for s in samples], [s.topology for s in samples]
    mean, _ = posterior(samples, sizes, topologies)
    # The mean may extrapolate below 0 between samples of very different throughput.
    return int(mean.argmax()), tuple(max(float(value), LEAST_THROUGHPUT) for value in mean)


# -- Bayesian optimization -----------------------------------------------------------------------
#
# A Gaussian process predicts the throughput of every setting with its uncertainty. The next setting
# has the largest expected improvement over the best so far. Throughput is relative to the first
# sample, so that the paper's xi = 0.1 has the same meaning for every model: an improvement has to
# exceed 10%. Usually less can be gained; the expected improvement then lies in the tail of the
# distribution, and the least certain settings are selected. Therefore the search explores first and
# measures the least certain of the promising sizes at its end.
#
# The hyperparameters of the kernel are constants, because a few noisy samples do not determine them
# and a fit sometimes takes noise for structure. They were chosen on simulated DeAR iterations of
# five networks and on synthetic curves, where they match fitted ones at 1% of noise and are better
# at 5%. The result is not sensitive to them.

XI = 0.1
"""The paper's value: high, to prefer exploration."""

OCTAVES = 2.0
"""Length scale of the kernel, in doublings of the size."""

SPREAD = 0.3
"""Prior standard deviation of the throughput over the range, relative to the first sample."""

NOISE = 0.02
"""Relative standard deviation of a sample."""

APART = 1.0
"""Distance of two topologies in length scales of the size: correlation 0.52 at equal size."""

CANDIDATES = 1000
"""Settings at which the acquisition function is evaluated: over 1 to 100 MB, one every 0.5%."""


def _most_expected_improvement(
    tuning: Tuning, samples: Sequence[Sample], topologies: Sequence[str]
) -> Setting:
    """Search size and topology jointly (DeAR leaves other parameters to future work, VII-A)."""
    points, targets, noise = _merged(samples)
    # The start may lie outside the range.
    low, high = math.log2(tuning.low_bytes), math.log2(tuning.high_bytes)
    inside = targets[(low <= points[:, 0]) & (points[:, 0] <= high)]
    if not len(inside):
        return size_at(tuning, 0.5), samples[0].topology
    sizes = np.geomspace(tuning.low_bytes, tuning.high_bytes, CANDIDATES // len(topologies))
    settings = [(float(size), name) for name in topologies for size in sizes]
    mean, std = _process(points, targets, noise).predict(_points(settings, _topologies(samples)))
    gain = expected_improvement(mean, np.maximum(std, 1e-12), float(inside.max()) + XI)
    size, topology = settings[int(np.argmax(gain))]
    return min(max(round(size), tuning.low_bytes), tuning.high_bytes), topology


def posterior(
    samples: Sequence[Sample], sizes: Sequence[float], topologies: Sequence[str] = ()
) -> tuple[Floats, Floats]:
    """Return mean and standard deviation of the iterations per second at other sizes.

    The deviation excludes the noise of a measurement. Without ``topologies`` that of the first
    sample applies.
    """
    unit = samples[0].iterations_per_s
    centre = _centre(samples)
    names = topologies or [samples[0].topology] * len(sizes)
    at = _points(list(zip(sizes, names, strict=True)), _topologies(samples))
    mean, std = _process(*_merged(samples)).predict(at)
    return (mean + centre) * unit, std * unit


def _centre(samples: Sequence[Sample]) -> float:
    """Return the mean relative throughput, which is the prediction far from all samples."""
    return float(
        np.mean([sample.iterations_per_s / samples[0].iterations_per_s for sample in samples])
    )


def _merged(samples: Sequence[Sample]) -> tuple[Floats, Floats, Floats]:
    """Return `_points`, centred relative throughputs, and noise; equal settings are averaged."""
    unit, centre = samples[0].iterations_per_s, _centre(samples)
    equal: dict[tuple[float, str], list[float]] = {}
    for sample in samples:
        key = (float(sample.bucket_bytes), sample.topology)
        equal.setdefault(key, []).append(sample.iterations_per_s / unit)
    means = np.array([np.mean(values) for values in equal.values()])
    counts = np.array([len(values) for values in equal.values()])
    points = _points(list(equal), _topologies(samples))
    return points, means - centre, NOISE * means / np.sqrt(counts)


def _topologies(samples: Sequence[Sample]) -> list[str]:
    return list(dict.fromkeys(sample.topology for sample in samples))


def _points(settings: Sequence[tuple[float, str]], known: Sequence[str]) -> Floats:
    """Return float64[settings, 1 + measured topologies + 1]: log2 of bytes, then the topology.

    Topologies are corners of a simplex, `APART` length scales from each other; those not measured
    yet share a corner.
    """
    points = np.zeros((len(settings), len(known) + 2))
    corner = APART * OCTAVES / math.sqrt(2.0)
    for row, (size, topology) in enumerate(settings):
        points[row, 0] = math.log2(size)
        points[row, 1 + (known.index(topology) if topology in known else len(known))] = corner
    return points


def _process(points: Floats, targets: Floats, noise: Floats) -> GaussianProcess:
    spread = max(SPREAD, float(np.std(targets)))
    # The last term keeps the matrix regular if throughputs differ by orders of magnitude.
    variance = noise**2 + 1e-6 * spread**2
    return GaussianProcess(points, targets, variance, spread=spread, length=OCTAVES)


# -- trial ---------------------------------------------------------------------------------------


def bucket_size_trial(
    tuning: Tuning, start_bytes: int, rank: int, ranks: Sequence[int], topology: str = ""
) -> LedTrial[Setting, BucketSizeResult]:
    """Return a trial of bucket sizes, and of topologies if there are several.

    The first block measures the start, which may lie outside the range. After ``tuning.trials``
    blocks the best measured size is chosen.
    """
    names = tuning.topologies or (topology,)

    def encode(setting: Setting) -> list[float]:
        return [float(setting[0]), float(names.index(setting[1]))]

    def decode(numbers: list[float]) -> Setting:
        nbytes, index = numbers
        low, high = tuning.low_bytes, tuning.high_bytes
        if nbytes != int(nbytes) or not (low <= nbytes <= high or nbytes == start_bytes):
            raise ValueError(
                f"the size has to be the start, {start_bytes} bytes, or {low} to {high}"
            )
        if index not in range(len(names)):
            raise ValueError(f"the topology has to be 0 to {len(names) - 1}, of {names!r}")
        return int(nbytes), names[int(index)]

    blocks = Blocks(
        name="bucket tuning",
        warmup=WARMUP,
        iterations=tuning.steps,
        combine=lambda seconds: statistics.fmean(1.0 / each for each in seconds),
    )
    start = start_bytes, topology
    return LedTrial(
        _search(tuning, start), blocks, rank, ranks,
        start=start, encode=encode, decode=decode, decisions=(tuning.trials, tuning.trials),
    )  # fmt: skip


def _search(tuning: Tuning, start: Setting) -> Search[Setting, BucketSizeResult]:
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
