"""What counts as an iteration of a row, in lockstep and without."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from wingbeat_lab.bench.training import Training


def training(monkeypatch: pytest.MonkeyPatch, worth: list[float] | None) -> tuple[Any, list[int]]:
    """A row whose n-th iteration brings what ``worth`` says to what is applied; None: lockstep."""
    made = SimpleNamespace(applied=None if worth is None else lambda: sum(worth[: len(own)]))
    row, own = Training(*[SimpleNamespace()] * 4, made), list[int]()  # type: ignore[arg-type]

    def iterate(_: Training, number: int) -> None:
        own.append(number)
        row.curve.append((0.0, 0.0))

    monkeypatch.setattr(Training, "iterate", iterate)
    return row, own


def test_in_lockstep_each_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    row, own = training(monkeypatch, None)
    assert list(row.iterations(5, 3)) == [0, 1, 2]
    assert own == [5, 6, 7]
    assert row.done() == 3


@pytest.mark.parametrize(
    ("worth", "made"),
    [
        ([1.0, 1.0, 1.0], 3),
        ([0.5] * 9, 6),  # others are slow
        ([0.0, 2.5, 0.5], 3),  # what others have made comes at once
        ([0.1] * 40, 30),  # adds up to a little less than whole numbers
        ([5.0], 1),
    ],
)
def test_without_lockstep_what_was_applied_counts(
    monkeypatch: pytest.MonkeyPatch, worth: list[float], made: int
) -> None:
    row, own = training(monkeypatch, worth)
    assert list(row.iterations(1, 3)) == [0, 1, 2]
    assert len(own) == made


def test_what_was_applied_before_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    row, own = training(monkeypatch, [2.0] + [1.0] * 9)
    list(row.iterations(1, 1))
    assert list(row.iterations(2, 2)) == [0, 1]
    assert len(own) == 3
