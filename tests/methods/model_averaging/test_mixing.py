"""The three conditions of section 3.3, for groups as the generator makes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import pytest

from helpers.group_simulation import Simulation, averaging_matrix, groups_in
from wingbeat.methods.model_averaging.rules import (
    ABLATION,
    count_components,
    group_of,
    spectral_gap,
)
from wingbeat.types import Layout

EIGHT = Layout.even(2, 4)


def test_averaging_matrix_is_that_of_figure_6() -> None:
    third = 1 / 3
    matrix = averaging_matrix([0, 3, 4], 6)
    assert matrix[0].tolist() == [third, 0, 0, third, third, 0] == matrix[3].tolist()
    assert matrix[1].tolist() == [0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("name", ABLATION)
def test_averaging_matrices_are_doubly_stochastic_projections(name: str) -> None:
    for run in Simulation(EIGHT, ABLATION[name], seed=3, kills=5).play().runs:
        matrix = averaging_matrix(run.members, 8)
        assert np.allclose(matrix.sum(0), 1)
        assert np.allclose(matrix.sum(1), 1)
        assert (matrix >= 0).all()
        assert np.allclose(matrix.T @ matrix, matrix)


def test_spectral_gap_has_known_values() -> None:
    assert spectral_gap([range(4)], 4) == pytest.approx(1)
    assert spectral_gap([(0, 1), (2, 3)], 4) == 0
    # One pair of two workers' three: eigenvalues of I - E[F] are 0 and 1/2, twice.
    assert spectral_gap([(0, 1), (1, 2), (0, 2)], 3) == pytest.approx(1 / 2)
    assert spectral_gap([(0,)], 1) == 1
    with pytest.raises(ValueError, match="no group"):
        spectral_gap([], 3)
    matrices = [averaging_matrix(group, 16) for k in range(4) for group in groups_in(
        Layout.even(4, 4), k)]  # fmt: skip
    eigenvalues = np.linalg.eigvalsh(np.mean(matrices, 0))
    static = [group for k in range(4) for group in groups_in(Layout.even(4, 4), k)]
    assert spectral_gap(static, 16) == pytest.approx(1 - eigenvalues[-2])


@pytest.mark.parametrize("name", ABLATION)
def test_spectral_gap_is_positive_for_connected_groups(name: str) -> None:
    runs = Simulation(EIGHT, ABLATION[name], seed=5, steps=60).play().runs
    assert spectral_gap([run.members for run in runs], 8) > 1e-3


def test_count_components_counts_unconnected_sets() -> None:
    assert count_components([], 3) == 3
    assert count_components([(0, 1), (2, 3), (1, 4)], 6) == 3
    assert count_components([(0, 1), (2, 3), (3, 0)], 4) == 1


PERIODS = (2, 3, 4)


def depends(partners: Iterable[Iterable[int]], period: int) -> bool:
    """Whether one's partners depend on the step, modulo a period: a chi-square test.

    Of 100,000 times that they do not, it says so about once (nine values to compare at most).
    """
    table = [Counter[int]() for _ in range(period)]
    for k, members in enumerate(partners):
        table[k % period].update(members)
    everyone = sum(table, Counter())
    whole, chi = everyone.total(), 0.0
    for row in table:
        for worker, of_all in everyone.items():
            expected = max(row.total(), 1e-9) * of_all / whole
            chi += (row[worker] - expected) ** 2 / expected
    freedom = (period - 1) * (len(everyone) - 1)
    return chi > freedom + 4.3 * (2 * freedom) ** 0.5 + 10


def partners(name: str, worker: int) -> list[tuple[int, ...]]:
    game = Simulation(EIGHT, ABLATION[name], seed=7, steps=600).play()
    members = {run.number: run.members for run in game.runs}
    log = game.workers[worker].log
    return [tuple(w for w in members[number] if w != worker) for number in log]


@pytest.mark.parametrize("name", ["random", "+ buffer", "+ division"])
def test_third_condition_groups_do_not_depend_on_the_step(name: str) -> None:
    met = partners(name, 1)
    assert not any(depends(met, period) for period in PERIODS)
    assert len(set().union(*met)) == 7


def test_inter_and_intra_groups_alternate_and_depend_on_no_step_otherwise() -> None:
    met = partners("+ inter-intra", 1)
    assert depends(met, 2)
    for phase in (0, 1):
        assert not any(depends(met[phase::2], period) for period in PERIODS)


def test_static_groups_depend_on_the_step() -> None:
    met = [set(group_of(EIGHT, 1, k)) - {1} for k in range(400)]
    assert depends(met, 4)
