"""The process and the improvement against scikit-learn's and scipy's, as reference."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.integrate import quad
from scipy.special import stdtrit
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern

from helpers.amounts import examples
from wingbeat.planning import bucket_size
from wingbeat.planning.bucket_size import OCTAVES, SNAP, SPREAD, XI, Sample, suggest
from wingbeat.planning.costs import student_half_width
from wingbeat.planning.gaussian_process import Floats, GaussianProcess, expected_improvement
from wingbeat.types import Tuning

MB = 2**20
SAMPLES = st.lists(
    st.builds(
        Sample, st.integers(MB, 100 * MB), st.floats(0.5, 2.0), st.sampled_from(["ring", "mesh"])
    ),
    min_size=1,
    max_size=15,
)


def reference(
    points: Floats, targets: Floats, noise: Floats, spread: float, length: float
) -> GaussianProcessRegressor:
    kernel = ConstantKernel(spread**2, "fixed") * Matern(length, "fixed", nu=2.5)
    process = GaussianProcessRegressor(kernel=kernel, alpha=noise, optimizer=None)
    return process.fit(points, targets)


@given(
    seed=st.integers(0, 2**32 - 1),
    observations=st.integers(1, 20),
    dimensions=st.integers(1, 4),
    spread=st.floats(0.01, 100.0),
    length=st.floats(0.05, 20.0),
    noise=st.floats(1e-3, 0.5),
)
@settings(deadline=None, max_examples=examples(60))
def test_posterior_equals_that_of_scikit_learn(
    seed: int, observations: int, dimensions: int, spread: float, length: float, noise: float
) -> None:
    rng = np.random.default_rng(seed)
    points, at = rng.normal(size=(observations, dimensions)), rng.normal(size=(50, dimensions))
    targets = spread * rng.normal(size=observations)
    variance = (noise * spread * rng.uniform(0.5, 2.0, observations)) ** 2
    process = GaussianProcess(points, targets, variance, spread=spread, length=length)
    mean, std = process.predict(at)
    wanted, deviation = reference(points, targets, variance, spread, length).predict(
        at, return_std=True
    )
    assert mean == pytest.approx(wanted, rel=1e-8, abs=1e-8 * spread)
    assert std**2 == pytest.approx(deviation**2, rel=1e-8, abs=1e-8 * spread**2)


@given(mean=st.floats(-2, 2), std=st.floats(0.01, 3.0), best=st.floats(-2, 2))
@settings(deadline=None, max_examples=examples(60))
def test_expected_improvement_is_the_integral(mean: float, std: float, best: float) -> None:
    [found] = expected_improvement(np.array([mean]), np.array([std]), best)
    top = max(best, mean) + 12 * std
    value, error = quad(
        lambda y: (y - best) * stats.norm.pdf(y, mean, std),
        best, top, points=[mean] if best < mean < top else None, limit=200,
    )  # fmt: skip
    assert found == pytest.approx(value, rel=1e-7, abs=2 * error + 1e-12)


@given(samples=SAMPLES)
@settings(deadline=None, max_examples=examples(60))
def test_suggestion_is_that_of_scikit_learn_and_scipy(samples: list[Sample]) -> None:
    names = ("ring", "mesh")
    tuning = Tuning(search="bo", low_bytes=MB, high_bytes=100 * MB, topologies=names)
    sizes = np.geomspace(MB, 100 * MB, bucket_size.CANDIDATES // 2)
    candidates = [(float(size), name) for name in names for size in sizes]
    points, targets, noise = bucket_size._merged(samples)
    spread = max(SPREAD, float(np.std(targets)))
    process = reference(points, targets, noise**2 + 1e-6 * spread**2, spread, OCTAVES)
    at = bucket_size._points(candidates, bucket_size._topologies(samples))
    mean, std = process.predict(at, return_std=True)
    more = mean - targets.max() - XI
    gain = more * stats.norm.cdf(more / std) + std * stats.norm.pdf(more / std)
    size, name = suggest(tuning, samples)
    equal = [candidates[i] for i in np.flatnonzero(gain >= (1 - 1e-6) * gain.max())]
    # A size near an end is rounded to it.
    assert [1 for best, its in equal if its == name and size == pytest.approx(best, rel=SNAP)]


@pytest.mark.parametrize("freedom", [*range(1, 60), 100, 101, 999, 1000, 10_000])
def test_student_half_width_equals_that_of_scipy(freedom: int) -> None:
    assert student_half_width(freedom) == pytest.approx(stdtrit(freedom, 0.975), rel=1e-12)
