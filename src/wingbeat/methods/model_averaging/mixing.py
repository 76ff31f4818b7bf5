"""What groups do to models: averaging matrices and how fast they mix (Ripples, section 3.3)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


def averaging_matrix(group: Sequence[int], workers: int) -> Matrix:
    """Return F^G (section 3.2), workers x workers: what averaging a group does to the models.

    >>> averaging_matrix([0, 2], 3)
    array([[0.5, 0. , 0.5],
           [0. , 1. , 0. ],
           [0.5, 0. , 0.5]])
    """
    out = np.eye(workers)
    out[np.ix_(group, group)] = 1 / len(group)
    return out


def spectral_gap(groups: Iterable[Sequence[int]], workers: int) -> float:
    """Return 1 - rho of these groups, taken as equally likely (section 3.3).

    rho is the second largest eigenvalue of E[F^T F], which is E[F] as each F is a projection. The
    gap is 0 if and only if the groups do not connect all workers. One group leaves most of many
    workers as they are: times the groups of an iteration, it is the gap of that.

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
    # Of I - E[F], whose smallest eigenvalue is that of the mean of all models: 0.
    gaps = np.linalg.eigvalsh(-total / number)
    return max(0.0, float(gaps[1]))


def parts_of(groups: Iterable[Sequence[int]], workers: int) -> int:
    """Return into how many parts the workers fall that no group connects: 1 if all mix."""
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
