"""How well groups mix the models of all workers (Ripples, section 3.3)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np


def spectral_gap(groups: Iterable[Sequence[int]], workers: int) -> float:
    """Return 1 - rho of equally likely groups (section 3.3).

    rho is the second largest eigenvalue of E[F^T F], which is E[F] because each F is a projection.
    The gap is 0 if and only if the groups do not connect all workers. A single group leaves most of
    many workers unchanged: multiply by the groups per iteration for the gap of an iteration.

    Raises:
        ValueError: there is no group.
    """
    total, number = np.zeros((workers, workers)), 0
    for group in groups:
        number += 1
        if len(group) > 1:
            total[np.ix_(group, group)] += 1 / len(group)
            total[group, group] -= 1
    if not number:
        raise ValueError("spectral_gap(): there is no group")
    if workers == 1:
        return 1.0
    # Eigenvalues of I - E[F]. The smallest is 0 and belongs to the mean of all models.
    gaps = np.linalg.eigvalsh(-total / number)
    return max(0.0, float(gaps[1]))


def count_components(groups: Iterable[Sequence[int]], workers: int) -> int:
    """Return the number of connected components of the workers: 1 if all models mix."""
    parent = list(range(workers))

    def root(worker: int) -> int:
        while parent[worker] != worker:
            parent[worker] = parent[parent[worker]]
            worker = parent[worker]
        return worker

    for group in groups:
        for member in group:
            parent[root(member)] = root(group[0])
    return sum(parent[worker] == worker for worker in range(workers))
