"""Bayesian optimisation of the bucket size (DeAR, section IV-B).

A Gaussian process says, for every size, what throughput to expect and how far off that may be.
The size tried next is the one with the largest expected improvement over the best so far.

Throughput counts relative to the first sample's, so that the paper's xi = 0.1 means the same for
every model: an improvement has to exceed 10%. Where less is to be gained, which is usual, the
expected improvement is all in the tail of the distribution, and the least known sizes win: xi
makes the search spread out first. Near the end the least known of the promising sizes are left.

How far sizes resemble each other is set here and not fitted: a handful of noisy samples cannot
tell, and a fit to them now and then takes noise for structure. The values were chosen on simulated
DeAR iterations of five networks and on synthetic curves, where they do as well as fitted ones at
1% of noise and better at 5%; anything near them does, too.

This module imports scipy and scikit-learn, which takes a second: import it when tuning.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from bayes_opt.acquisition import ExpectedImprovement
from bayes_opt.target_space import TargetSpace
from numpy.typing import NDArray
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern

from wingbeat.planning.plans.sample import Sample, between
from wingbeat.types import Tuning

XI = 0.1
"""The paper's: high, to prefer exploration."""

OCTAVES = 2.0
"""How far in size, in doublings, what one sample says reaches (the kernel's length scale)."""

SPREAD = 0.3
"""How much throughput is thought to change over the range, relative to the first sample."""

NOISE = 0.02
"""Standard deviation of a sample, relative to itself."""

APART = 1.0
"""How far two topologies are from each other, in length scales of the size: what one sample says of
the same size on another topology correlates by 0.52."""

CANDIDATES = 1000
"""Sizes of which the acquisition function picks one: over 1 to 100 MB, one every 0.5%.

In one dimension that leaves nothing for gradient descent to improve (``n_smart=0``); together with
hyperparameters that stand, it makes a suggestion cost milliseconds.
"""

Floats = NDArray[np.float64]


def suggest(tuning: Tuning, samples: Sequence[Sample]) -> int:
    """Return the size in bytes with the largest expected improvement, within the range.

    Args:
        tuning: the range, ``low_bytes < high_bytes``.
        samples: all trials so far, one or more.
    """
    points, targets, noise = _merged(samples)
    low, high = math.log2(tuning.low_bytes), math.log2(tuning.high_bytes)
    space = TargetSpace(None, {"log2": (low, high)})
    for size, target in zip(points[:, 0], targets, strict=True):
        if low <= size <= high:  # the start may lie outside
            space.register({"log2": size}, target)
    if not len(space):
        return between(tuning, 0.5)
    found = ExpectedImprovement(xi=XI).suggest(
        _process(points[:, :1], targets, noise),
        space,
        n_random=CANDIDATES,
        n_smart=0,
        fit_gp=False,
        random_state=len(samples),
    )
    return min(max(round(math.pow(2.0, found[0])), tuning.low_bytes), tuning.high_bytes)


def suggest_among(tuning: Tuning, samples: Sequence[Sample]) -> tuple[int, str]:
    """Return the size in bytes and the topology with the largest expected improvement, jointly.

    One process is fitted to all samples: sizes resemble each other along their logarithm, and
    topologies all alike (DeAR leaves more than the size to future work, section VII-A).

    Args:
        tuning: the range, ``low_bytes < high_bytes``, and the topologies.
        samples: all trials so far, one or more.
    """
    sizes = np.geomspace(tuning.low_bytes, tuning.high_bytes, CANDIDATES // len(tuning.topologies))
    settings = [(float(size), name) for name in tuning.topologies for size in sizes]
    points, targets, noise = _merged(samples)
    mean, std = _process(points, targets, noise).predict(
        _points(settings, _topologies(samples)), return_std=True
    )
    acquisition = ExpectedImprovement(xi=XI)
    acquisition.y_max = targets.max()
    gain = acquisition.base_acq(mean, np.maximum(std, 1e-12))
    size, topology = settings[int(np.argmax(gain))]
    return min(max(round(size), tuning.low_bytes), tuning.high_bytes), topology


def posterior(
    samples: Sequence[Sample], sizes: Sequence[float], topologies: Sequence[str] = ()
) -> tuple[Floats, Floats]:
    """Return what the samples say of other sizes.

    Args:
        samples: one or more trials; the first is where tuning started.
        sizes: in bytes.
        topologies: of each size its topology; none: the first sample's.

    Returns:
        The mean and the standard deviation (without the noise of a measurement) of the throughput
        at each size, in iterations per second, float64.
    """
    unit = samples[0].throughput
    centre = _centre(samples)
    names = topologies or [samples[0].topology] * len(sizes)
    at = _points(list(zip(sizes, names, strict=True)), _topologies(samples))
    mean, std = _process(*_merged(samples)).predict(at, return_std=True)
    return (mean + centre) * unit, std * unit


def _centre(samples: Sequence[Sample]) -> float:
    """Return the mean relative throughput: what is expected far from all samples."""
    return float(np.mean([sample.throughput / samples[0].throughput for sample in samples]))


def _merged(samples: Sequence[Sample]) -> tuple[Floats, Floats, Floats]:
    """Return points as `_points` does, throughputs relative to the first, centred, and their noise.

    Trials of the same size and topology become one that is known better.
    """
    unit, centre = samples[0].throughput, _centre(samples)
    alike: dict[tuple[float, str], list[float]] = {}
    for sample in samples:
        key = (float(sample.nbytes), sample.topology)
        alike.setdefault(key, []).append(sample.throughput / unit)
    means = np.array([np.mean(values) for values in alike.values()])
    counts = np.array([len(values) for values in alike.values()])
    points = _points(list(alike), _topologies(samples))
    return points, means - centre, NOISE * means / np.sqrt(counts)


def _topologies(samples: Sequence[Sample]) -> list[str]:
    """Return the topologies tried so far, each once."""
    return list(dict.fromkeys(sample.topology for sample in samples))


def _points(settings: Sequence[tuple[float, str]], known: Sequence[str]) -> Floats:
    """Return where sizes and topologies lie: float64[settings, 1 + topologies tried + 1].

    The first column is the size (log2 of bytes). Topologies are corners of a simplex: all are
    `APART` length scales from each other, and those not tried yet share a corner.
    """
    points = np.zeros((len(settings), len(known) + 2))
    corner = APART * OCTAVES / math.sqrt(2.0)
    for row, (size, topology) in enumerate(settings):
        points[row, 0] = math.log2(size)
        points[row, 1 + (known.index(topology) if topology in known else len(known))] = corner
    return points


def _process(points: Floats, targets: Floats, noise: Floats) -> Any:
    """Return a Gaussian process that has seen the samples."""
    spread = max(SPREAD, float(np.std(targets)))
    process = GaussianProcessRegressor(
        kernel=ConstantKernel(spread**2, "fixed") * Matern(OCTAVES, "fixed", nu=2.5),
        # The last term keeps the matrix regular when throughputs differ by orders of magnitude.
        alpha=noise**2 + 1e-6 * spread**2,
        optimizer=None,
    )
    return process.fit(points, targets)
