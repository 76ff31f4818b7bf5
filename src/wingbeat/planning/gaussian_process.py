"""Gaussian process regression with fixed hyperparameters, and the expected improvement.

Equations: Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, algorithm 2.1 and
equation 4.17.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class GaussianProcess:
    """A posterior with mean 0 before the observations, and a Matern kernel of smoothness 5/2."""

    def __init__(
        self, points: Floats, targets: Floats, noise: Floats, *, spread: float, length: float
    ) -> None:
        """Condition on observations.

        Args:
            points: float64[observations, dimensions].
            targets: float64[observations].
            noise: float64[observations], the variance of each target; above 0.
            spread: standard deviation of the function.
            length: length scale, in the unit of ``points``.

        Raises:
            numpy.linalg.LinAlgError: the noise is too small for points as close as these.
        """
        self._points, self._spread, self._length = points, spread, length
        self._root = np.linalg.cholesky(self._kernel(points) + np.diag(noise))
        self._weights = np.linalg.solve(self._root.T, np.linalg.solve(self._root, targets))

    def predict(self, at: Floats) -> tuple[Floats, Floats]:
        """Return mean and standard deviation of the function at float64[settings, dimensions]."""
        kernel = self._kernel(at)
        explained = np.linalg.solve(self._root, kernel.T)
        variance = self._spread**2 - (explained**2).sum(axis=0)
        return kernel @ self._weights, np.sqrt(np.maximum(variance, 0.0))

    def _kernel(self, at: Floats) -> Floats:
        """Return the covariances float64[settings, observations]."""
        difference = at[:, None, :] - self._points[None, :, :]
        scaled = math.sqrt(5.0) / self._length * np.sqrt((difference**2).sum(axis=2))
        matern: Floats = (1.0 + scaled + scaled**2 / 3.0) * np.exp(-scaled)
        return self._spread**2 * matern


def expected_improvement(mean: Floats, std: Floats, best: float) -> Floats:
    """Return the mean of ``max(value - best, 0)`` for normal values with ``std`` above 0."""
    scores = (mean - best) / std
    density = np.exp(-(scores**2) / 2.0) / math.sqrt(2.0 * math.pi)
    # erfc keeps the digits of small probabilities; scores far below 0 are usual.
    below = np.array([0.5 * math.erfc(-score / math.sqrt(2.0)) for score in scores])
    gain: Floats = std * (density + scores * below)
    return gain
