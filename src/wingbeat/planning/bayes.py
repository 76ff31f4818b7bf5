"""Bayesian optimization of the bucket size (DeAR, section IV-B).

A Gaussian process predicts the throughput of every size with its uncertainty. The next size has the
largest expected improvement over the best so far.

Throughput is relative to the first sample, so that the paper's xi = 0.1 has the same meaning for
every model: an improvement has to exceed 10%. Usually less can be gained; the expected improvement
then lies in the tail of the distribution, and the least certain sizes are selected. Therefore the
search explores first and measures the least certain of the promising sizes at its end.

The hyperparameters of the kernel are constants, because a few noisy samples do not determine them
and a fit sometimes takes noise for structure. They were chosen on simulated DeAR iterations of five
networks and on synthetic curves, where they match fitted ones at 1% of noise and are better at 5%.
The result is not sensitive to them.

This module imports scipy and scikit-learn, which takes a second: import it only when tuning.
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

from wingbeat.planning.search_space import Sample, size_at
from wingbeat.types import Tuning

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
"""Sizes at which the acquisition function is evaluated: over 1 to 100 MB, one every 0.5%.

Gradient descent in one dimension cannot improve on that (``n_smart=0``). With constant
hyperparameters a suggestion takes milliseconds.
"""

Floats = NDArray[np.float64]


def suggest(tuning: Tuning, samples: Sequence[Sample]) -> int:
    """Return the size in bytes with the largest expected improvement, within the range."""
    points, targets, noise = _merged(samples)
    low, high = math.log2(tuning.low_bytes), math.log2(tuning.high_bytes)
    space = TargetSpace(None, {"log2": (low, high)})
    for size, target in zip(points[:, 0], targets, strict=True):
        if low <= size <= high:  # the start may lie outside the range
            space.register({"log2": size}, target)
    if not len(space):
        return size_at(tuning, 0.5)
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

    One process is fitted to all samples. The kernel correlates sizes along their logarithm, and all
    topologies equally (DeAR leaves other parameters to future work, section VII-A).
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
    """Return mean and standard deviation of the iterations per second at other sizes.

    The deviation excludes the noise of a measurement. Without ``topologies`` that of the first
    sample applies.
    """
    unit = samples[0].iterations_per_s
    centre = _centre(samples)
    names = topologies or [samples[0].topology] * len(sizes)
    at = _points(list(zip(sizes, names, strict=True)), _topologies(samples))
    mean, std = _process(*_merged(samples)).predict(at, return_std=True)
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


def _process(points: Floats, targets: Floats, noise: Floats) -> Any:
    spread = max(SPREAD, float(np.std(targets)))
    process = GaussianProcessRegressor(
        kernel=ConstantKernel(spread**2, "fixed") * Matern(OCTAVES, "fixed", nu=2.5),
        # The last term keeps the matrix regular if throughputs differ by orders of magnitude.
        alpha=noise**2 + 1e-6 * spread**2,
        optimizer=None,
    )
    return process.fit(points, targets)
