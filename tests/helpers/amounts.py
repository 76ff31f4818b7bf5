"""How much ``make test`` runs of what has many cases; ``make test-slow`` runs all of it."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from itertools import product
from typing import Any

import pytest
from _pytest.mark import ParameterSet

ALL_EXAMPLES = "WINGBEAT_TEST_ALL_EXAMPLES"
"""Environment variable: set where hypothesis shall try as many examples as a test asks for."""


def examples(wanted: int) -> int:
    """Return how many examples hypothesis tries: a fifth of those wanted, in ``make test``."""
    return wanted if os.environ.get(ALL_EXAMPLES) else max(wanted // 5, 5)


def each_once(*lists: Sequence[Any]) -> list[ParameterSet]:
    """Return the product of the lists as parameters, most of which wait for ``make test-slow``.

    ``make test`` runs as many rows as the longest list has values, with each value of each list.
    """
    rows = range(max(map(len, lists)))
    quick = {tuple(row % len(values) for values in lists) for row in rows}
    return [
        pytest.param(
            *(values[at] for at, values in zip(place, lists, strict=True)),
            marks=[] if place in quick else [pytest.mark.slow],
        )
        for place in product(*(range(len(values)) for values in lists))
    ]


def slow_except(quick: Collection[Any], values: Iterable[Any]) -> list[ParameterSet]:
    """Return parameters of which all but the quick ones wait for ``make test-slow``."""
    values = list(values)
    missing = [each for each in quick if each not in values]
    assert not missing, f"no such parameter: {missing}"
    return [
        pytest.param(each, marks=[] if each in quick else [pytest.mark.slow]) for each in values
    ]
