"""The tuner of thresholds in virtual time: workers never disagree, and nothing is believed."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.thresholds import CURVES, noisy, play, seconds_of
from wingbeat.errors import PeerError
from wingbeat.planning.plans.thresholds.cuts import Cuts, levels_of
from wingbeat.planning.plans.thresholds.search import most_trials
from wingbeat.planning.plans.thresholds.tuner import SETTLING, ThresholdTuner, most_iterations

START = {2: (0.5,), 3: (0.6, 0.3), 4: (0.75, 0.5, 0.25)}


@settings(max_examples=60)
@given(
    layers=st.integers(2, 60),
    classes=st.integers(2, 4),
    steps=st.integers(1, 4),
    size=st.integers(1, 4),
    seed=st.integers(0, 2**32),
)
def test_workers_never_disagree_and_always_end(layers, classes, steps, size, seed) -> None:
    chance = random.Random(seed)

    def seconds(cuts: Cuts, iteration: int) -> list[float]:
        return [chance.uniform(0.1, 9) for _ in range(size)]

    result, history = play(seconds, layers, START[classes], steps, size)
    assert len(history) <= most_iterations(layers, classes, steps)
    assert result.iterations == len(history) - 1, "all but the one in which it was decided"


def test_what_is_no_time_is_not_counted_and_does_not_stop_it() -> None:
    chance = random.Random(3)
    odd = [0.0, math.nan, -1.0, 1e-12, math.inf]

    def seconds(cuts: Cuts, iteration: int) -> list[float]:
        fine = [seconds_of(CURVES["vee"], cuts, 12)] * 3
        return [chance.choice(odd) if chance.random() < 0.3 else s for s in fine]

    result, _ = play(seconds, 12, size=3)
    assert result.chosen == (8,)
    for sample in result.samples:
        assert sample.seconds == pytest.approx(seconds_of(CURVES["vee"], sample.cuts, 12))


def test_the_mean_over_the_workers_counts() -> None:
    def seconds(cuts: Cuts, iteration: int) -> list[float]:
        place = cuts[0] if cuts else 0
        return [1 + 0.01 * place, 1.3 - 0.02 * place]

    result, _ = play(seconds, 9, size=2)
    assert result.seconds((8,)) == pytest.approx((1.08 + 1.14) / 2)


def test_the_first_iteration_after_a_change_does_not_count() -> None:
    since: dict[str, object] = {"cuts": None, "count": 0}

    def seconds(cuts: Cuts, iteration: int) -> list[float]:
        since["count"] = since["count"] + 1 if cuts == since["cuts"] else 0
        since["cuts"] = cuts
        return [9.0 if since["count"] < SETTLING else seconds_of(CURVES["vee"], cuts, 12)]

    result, history = play(seconds, 12, steps=1)
    assert all(sample.seconds < 2 for sample in result.samples)
    assert len(history) <= 12 * (SETTLING + 1 + 2) + 2


def test_divisions_that_are_the_same_are_tried_once() -> None:
    _, history = play(lambda cuts, _: [seconds_of(CURVES["vee"], cuts, 6)], 6, START[4])
    tried = [cuts for i, cuts in enumerate(history) if i == 0 or cuts != history[i - 1]]
    # The start is what training began with, which may come again; and the end is the best of all.
    assert len(set(tried[1:-1])) == len(tried[1:-1])


def test_rank_0_says_in_one_line_what_was_found(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="wingbeat"):
        play(lambda cuts, _: [seconds_of(CURVES["vee"], cuts, 12)] * 2, 12, size=2)
    [said] = [record.getMessage() for record in caplog.records]
    assert "12 divisions tried: 0.2917 (8 + 4 of 12 layers), 1014 ms an iteration" in said
    assert said.endswith("1210 ms with all in one class")


def test_where_nothing_matters_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="wingbeat"):
        result, _ = play(noisy(CURVES["flat"], 12, 0.001, 1), 12)
    assert result.spread < 0.02
    assert "none matters here" in caplog.text


def ready(rank: int = 1, size: int = 2, classes: int = 3) -> ThresholdTuner:
    """A tuner that has taken decision 1: one class."""
    tuner = ThresholdTuner(10, START[classes], 2, rank, size)
    tuner.take([row(1, taken=0), row(0, taken=0)])
    return tuner


def row(number: float, *cuts: float, ends: float = 0, seconds: float = 1, taken: float = 1,
        places: int = 2) -> list[float]:  # fmt: skip
    return [seconds, taken, number, ends, *cuts, *[0.0] * (places - len(cuts))]


OTHER = [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([row(1)], "brought 1 of 2 rows"),
        ([row(1), OTHER[:5]], "rank 1 sent .* 6 finite numbers"),
        ([row(1), [math.nan, *OTHER[1:]]], "rank 1 sent .* finite"),
        ([row(1), [-1.0, *OTHER[1:]]], "rank 1 sent .* no time"),
        ([row(1), [1.0, 2.0, *OTHER[2:]]], "rank 1 sent .* no number of a decision"),
        ([row(1), [1.0, 0.5, *OTHER[2:]]], "rank 1 sent .* no number of a decision"),
        ([row(3), OTHER], "rank 0 sent .* decision 1 or the next"),
        ([row(1.5), OTHER], "rank 0 sent .* decision 1 or the next"),
        ([row(0, taken=0), [1.0, 0.0, *OTHER[2:]]], "rank 0 sent .* decision 1 or the next"),
        ([row(2, 10), OTHER], "do not divide 10 layers"),
        ([row(2, 5, 3), OTHER], "do not divide"),
        ([row(2, 2.5), OTHER], "do not divide"),
        ([row(2, -1), OTHER], "do not divide"),
        ([row(2, 0, 4), OTHER], "do not divide"),
        ([row(2, 4, ends=2), OTHER], "tuning ends"),
        ([row(1, 4), OTHER], "that decision was"),
        ([row(1, ends=1), OTHER], "that decision was"),
    ],
)
def test_a_malformed_row_is_refused_and_its_sender_named(
    rows: Sequence[Sequence[float]], named: str
) -> None:
    with pytest.raises(PeerError, match=named):
        ready().take(rows)


def test_tuning_that_would_never_end_is_refused() -> None:
    tuner = ThresholdTuner(3, START[2], 1, 1, 2)
    other = [1.0, 0.0, 0.0, 0.0, 0.0]

    def take(number: int) -> None:
        tuner.take([row(number, 1 + number % 2, taken=0, places=1), other])

    last = most_trials(3, 2) + 1
    for number in range(1, last):
        take(number)
    with pytest.raises(PeerError, match="at the latest"):
        take(last)


def test_a_decision_is_acted_on_when_it_is_heard_also_by_rank_0() -> None:
    tuner = ThresholdTuner(10, (0.25,), 1, 0, 1)
    assert tuner.take([tuner.report(1.0)]) == levels_of((), 10, 2)
    tuner.take([tuner.report(1.0)])  # settles
    tuner.take([tuner.report(1.0)])  # counts
    assert tuner.report(1.0)[2:] == [2.0, 0.0, 1.0]
    assert tuner.take([tuner.report(1.0)]) == levels_of((1,), 10, 2)


def test_training_that_begins_with_the_first_candidate_does_not_change() -> None:
    tuner = ThresholdTuner(10, (0.95,), 1, 0, 1)
    assert tuner.take([tuner.report(1.0)]) is None
