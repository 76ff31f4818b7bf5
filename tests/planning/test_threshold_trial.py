"""The trial of thresholds in virtual time: workers never disagree, and nothing is believed."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.amounts import examples
from helpers.thresholds import CURVES, noisy, play, seconds_of
from wingbeat.errors import PeerError
from wingbeat.planning.thresholds import (
    WARMUP,
    Cuts,
    max_blocks,
    max_iterations,
    threshold_trial,
)
from wingbeat.planning.trials import LedTrial

START = {2: (0.5,), 3: (0.6, 0.3), 4: (0.75, 0.5, 0.25)}


@settings(max_examples=examples(60))
@given(
    layers=st.integers(2, 60),
    classes=st.integers(2, 4),
    steps=st.integers(1, 4),
    size=st.integers(1, 4),
    seed=st.integers(0, 2**32),
)
def test_threshold_trial_workers_always_agree_and_trial_ends(
    layers, classes, steps, size, seed
) -> None:
    chance = random.Random(seed)

    def seconds(cuts: Cuts, iteration: int) -> list[float]:
        return [chance.uniform(0.1, 9) for _ in range(size)]

    result, history = play(seconds, layers, START[classes], steps, size)
    assert len(history) <= max_iterations(layers, classes, steps)
    assert result.iterations == len(history) - 1, "all but the one in which it was decided"


def test_threshold_trial_invalid_times_do_not_count() -> None:
    chance = random.Random(3)
    odd = [0.0, math.nan, -1.0, 1e-12, math.inf]

    def seconds(cuts: Cuts, iteration: int) -> list[float]:
        fine = [seconds_of(CURVES["vee"], cuts, 12)] * 3
        return [chance.choice(odd) if chance.random() < 0.3 else s for s in fine]

    result, _ = play(seconds, 12, size=3)
    assert result.chosen == (8,)
    for sample in result.samples:
        assert sample.seconds == pytest.approx(seconds_of(CURVES["vee"], sample.cuts, 12))


def test_threshold_trial_mean_of_workers_counts() -> None:
    def seconds(cuts: Cuts, iteration: int) -> list[float]:
        place = cuts[0] if cuts else 0
        return [1 + 0.01 * place, 1.3 - 0.02 * place]

    result, _ = play(seconds, 9, size=2)
    assert result.seconds((8,)) == pytest.approx((1.08 + 1.14) / 2)


def test_threshold_trial_first_iteration_after_change_does_not_count() -> None:
    since: dict[str, object] = {"cuts": None, "count": 0}

    def seconds(cuts: Cuts, iteration: int) -> list[float]:
        since["count"] = since["count"] + 1 if cuts == since["cuts"] else 0
        since["cuts"] = cuts
        return [9.0 if since["count"] < WARMUP else seconds_of(CURVES["vee"], cuts, 12)]

    result, history = play(seconds, 12, steps=1)
    assert all(sample.seconds < 2 for sample in result.samples)
    assert len(history) <= 12 * (WARMUP + 1 + 2) + 2


def test_threshold_trial_equal_divisions_are_measured_once() -> None:
    _, history = play(lambda cuts, _: [seconds_of(CURVES["vee"], cuts, 6)], 6, START[4])
    tried = [cuts for i, cuts in enumerate(history) if i == 0 or cuts != history[i - 1]]
    # The start is what training began with, which may come again; and the end is the best of all.
    assert len(set(tried[1:-1])) == len(tried[1:-1])


def test_threshold_trial_rank_0_logs_result_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="wingbeat"):
        play(lambda cuts, _: [seconds_of(CURVES["vee"], cuts, 12)] * 2, 12, size=2)
    [said] = [record.getMessage() for record in caplog.records]
    assert "12 divisions tried: 0.2917 (8 + 4 of 12 layers), 1014 ms an iteration" in said
    assert said.endswith("1210 ms with all in one class")


def test_threshold_trial_no_effect_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="wingbeat"):
        result, _ = play(noisy(CURVES["flat"], 12, 0.001, 1), 12)
    assert result.spread < 0.02
    assert "none matters here" in caplog.text


def ready(rank: int = 1, size: int = 2, classes: int = 3) -> LedTrial:
    """A trial that has taken decision 1: one class."""
    trial = threshold_trial(10, START[classes], 2, rank, range(size))
    trial.process_rows([row(1, taken=0), row(0, taken=0)])
    return trial


def row(number: float, *cuts: float, ends: float = 0, seconds: float = 1, taken: float = 1,
        places: int = 2) -> list[float]:  # fmt: skip
    return [seconds, taken, number, ends, *cuts, *[0.0] * (places - len(cuts))]


OTHER = [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([row(1)], "returned 1 of 2 rows"),
        ([row(1), OTHER[:5]], "rank 1 sent .* 6 finite numbers"),
        ([row(1), [math.nan, *OTHER[1:]]], "rank 1 sent .* finite"),
        ([row(1), [-1.0, *OTHER[1:]]], "rank 1 sent .* no iteration time"),
        ([row(1), [1.0, 2.0, *OTHER[2:]]], "rank 1 sent .* no block or decision"),
        ([row(1), [1.0, 0.5, *OTHER[2:]]], "rank 1 sent .* no block or decision"),
        ([row(3), OTHER], "rank 0 sent .* decision 1 or the next"),
        ([row(1.5), OTHER], "rank 0 sent .* decision 1 or the next"),
        ([row(0, taken=0), [1.0, 0.0, *OTHER[2:]]], "rank 0 sent .* decision 1 or the next"),
        ([row(2, 10), OTHER], "do not divide 10 layers"),
        ([row(2, 5, 3), OTHER], "do not divide"),
        ([row(2, 2.5), OTHER], "do not divide"),
        ([row(2, -1), OTHER], "do not divide"),
        ([row(2, 0, 4), OTHER], "do not divide"),
        ([row(2, 4, ends=2), OTHER], "the trial ends"),
        ([row(1, 4), OTHER], "that decision was"),
        ([row(1, ends=1), OTHER], "that decision was"),
    ],
)
def test_threshold_trial_malformed_row_is_refused_and_names_sender(
    rows: Sequence[Sequence[float]], named: str
) -> None:
    with pytest.raises(PeerError, match=named):
        ready().process_rows(rows)


def test_threshold_trial_endless_tuning_is_refused() -> None:
    trial = threshold_trial(3, START[2], 1, 1, range(2))
    other = [1.0, 0.0, 0.0, 0.0, 0.0]

    def take(number: int) -> None:
        trial.process_rows([row(number, 1 + number % 2, taken=0, places=1), other])

    last = max_blocks(3, 2) + 1
    for number in range(1, last):
        take(number)
    with pytest.raises(PeerError, match="the trial ends with decision 1 to"):
        take(last)


def test_threshold_trial_decision_applies_when_delivered() -> None:
    trial = threshold_trial(10, (0.25,), 1, 0, range(1))
    assert trial.process_rows([trial.report(1.0)]) == ()
    trial.process_rows([trial.report(1.0)])  # settles
    trial.process_rows([trial.report(1.0)])  # counts
    assert trial.report(1.0)[2:] == [2.0, 0.0, 1.0]
    assert trial.process_rows([trial.report(1.0)]) == (1,)


def test_threshold_trial_start_equal_to_first_candidate_is_no_change() -> None:
    trial = threshold_trial(10, (0.95,), 1, 0, range(1))
    assert trial.process_rows([trial.report(1.0)]) is None
