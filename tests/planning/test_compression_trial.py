"""Whether a codec is faster, decided in virtual time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.errors import PeerError
from wingbeat.planning import trials as machine
from wingbeat.planning.trials import CompressionTimes, Trial, compression_trial


def decide(
    seconds: Callable[[int, bool], float], size: int = 2
) -> tuple[list[Trial[bool, CompressionTimes]], int]:
    """Run all workers' trials against a clock; return them and the iterations that it took."""
    trials = [compression_trial(rank, range(size)) for rank in range(size)]
    for iteration in range(200):
        rows = [t.report(seconds(rank, t.candidate)) for rank, t in enumerate(trials)]
        for t in trials:
            t.process_rows(rows)
        assert len({(t.candidate, t.number, t.done) for t in trials}) == 1
        if trials[0].done:
            return trials, iteration + 1
    raise AssertionError("no decision")


FEWEST = (
    machine.COMPRESSION_FIRST_WARMUP
    + machine.COMPRESSION_WARMUP
    + 2 * machine.COMPRESSION_ITERATIONS
)


@pytest.mark.parametrize(
    ("coded", "dense", "stays"), [(1.0, 2.0, True), (2.0, 1.0, False), (1.0, 1.0, False)]
)
def test_compression_trial_keeps_the_faster(coded, dense, stays) -> None:
    trials, iterations = decide(lambda _, on: coded if on else dense)
    assert [t.candidate for t in trials] == [stays, stays]
    if coded != dense:
        assert iterations == FEWEST


def test_compression_trial_slowest_worker_counts() -> None:
    trials, _ = decide(lambda rank, on: 5.0 if on and rank == 1 else 3.0)
    assert not trials[0].candidate


@given(ratio=st.floats(0.2, 5.0), noise=st.floats(0.0, 0.01))
def test_compression_trial_needs_three_percent_gain(ratio, noise) -> None:
    trials, iterations = decide(lambda rank, on: (ratio if on else 1.0) + noise * rank)
    measured = (ratio + noise) / (1.0 + noise)
    assert trials[0].result is not None
    assert trials[0].result.ratio == pytest.approx(measured)
    assert trials[0].candidate == (trials[0].result.ratio <= machine.WORTHWHILE)
    assert iterations <= FEWEST + 4 * (machine.COMPRESSION_WARMUP + machine.COMPRESSION_ITERATIONS)


def test_compression_trial_single_slow_iteration_does_not_decide() -> None:
    count = iter(range(1000))
    trials, _ = decide(lambda _, on: 50.0 if next(count) == 8 else (0.9 if on else 1.0))
    assert trials[0].candidate


def test_compression_trial_unknown_and_outdated_times_do_not_count() -> None:
    one = compression_trial(0, range(2))
    for rows in ([[0.0, 0.0], [1.0, 0.0]], [[1.0, 0.0], [1.0, 1.0]]):
        assert not one.process_rows(rows)
    assert one._values == []


@pytest.mark.parametrize(
    "rows",
    [
        [[1.0, 0.0]],
        [[1.0, 0.0], [1.0]],
        [[1.0, 0.0], [float("nan"), 0.0]],
        [[1.0, 0.0], [-1.0, 0.0]],
        [[1.0, 0.0], [1.0, 7.0]],
    ],
)
def test_compression_trial_malformed_rows_are_refused(rows) -> None:
    with pytest.raises(PeerError, match="rank 0: "):
        compression_trial(0, range(2)).process_rows(rows)
