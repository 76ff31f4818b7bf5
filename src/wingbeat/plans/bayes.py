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

from wingbeat.plans.sample import Sample, between
from wingbeat.types import Tuning

XI = 0.1
"""The paper's: high, to prefer exploration."""

OCTAVES = 2.0
"""How far in size, in doublings, what one sample says reaches (the kernel's length scale)."""

SPREAD = 0.3
"""How much throughput is thought to change over the range, relative to the first sample."""

NOISE = 0.02
"""Standard deviation of a sample, relative to itself."""

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
    sizes, targets, noise = _merged(samples)
    low, high = math.log2(tuning.low_bytes), math.log2(tuning.high_bytes)
    space = TargetSpace(None, {"log2": (low, high)})
    for size, target in zip(sizes, targets, strict=True):
        if low <= size <= high:  # the start may lie outside
            space.register({"log2": size}, target)
    if not len(space):
        return between(tuning, 0.5)
    found = ExpectedImprovement(xi=XI).suggest(
        _process(sizes, targets, noise),
        space,
        n_random=CANDIDATES,
        n_smart=0,
        fit_gp=False,
        random_state=len(samples),
    )
    return min(max(round(math.pow(2.0, found[0])), tuning.low_bytes), tuning.high_bytes)


def posterior(samples: Sequence[Sample], sizes: Sequence[float]) -> tuple[Floats, Floats]:
    """Return what the samples say of other sizes.

    Args:
        samples: one or more trials; the first is where tuning started.
        sizes: in bytes.

    Returns:
        The mean and the standard deviation (without the noise of a measurement) of the throughput
        at each size, in iterations per second, float64.
    """
    unit = samples[0].throughput
    centre = _centre(samples)
    at = np.log2(np.asarray(sizes, dtype=np.float64))[:, None]
    mean, std = _process(*_merged(samples)).predict(at, return_std=True)
    return (mean + centre) * unit, std * unit


def _centre(samples: Sequence[Sample]) -> float:
    """Return the mean relative throughput: what is expected far from all samples."""
    return float(np.mean([sample.throughput / samples[0].throughput for sample in samples]))


def _merged(samples: Sequence[Sample]) -> tuple[Floats, Floats, Floats]:
    """Return sizes (log2 of bytes), throughputs relative to the first, centred, and their noise.

    Trials of the same size become one that is known better.
    """
    unit, centre = samples[0].throughput, _centre(samples)
    by_size: dict[int, list[float]] = {}
    for sample in samples:
        by_size.setdefault(sample.nbytes, []).append(sample.throughput / unit)
    means = np.array([np.mean(values) for values in by_size.values()])
    counts = np.array([len(values) for values in by_size.values()])
    sizes = np.log2(np.array(list(by_size), dtype=np.float64))
    return sizes, means - centre, NOISE * means / np.sqrt(counts)


def _process(sizes: Floats, targets: Floats, noise: Floats) -> Any:
    """Return a Gaussian process that has seen the samples."""
    spread = max(SPREAD, float(np.std(targets)))
    process = GaussianProcessRegressor(
        kernel=ConstantKernel(spread**2, "fixed") * Matern(OCTAVES, "fixed", nu=2.5),
        # The last term keeps the matrix regular when throughputs differ by orders of magnitude.
        alpha=noise**2 + 1e-6 * spread**2,
        optimizer=None,
    )
    return process.fit(sizes[:, None], targets)
