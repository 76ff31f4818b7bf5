"""Which plan is the fastest, decided in virtual time."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.amounts import examples
from wingbeat.errors import PeerError
from wingbeat.planning import trials as machine
from wingbeat.planning.trials import Trial, plan_trial

BLOCK = machine.PLAN_WARMUP + machine.PLAN_ITERATIONS
ROUNDS = len(machine.PLAN_MARGINS)
LAG = 1
"""Iterations from a change of plan until the first one with it is heard of."""

Seconds = Callable[[int, int], float]


def decide(
    seconds: Seconds, count: int, size: int = 2, most: int = 10_000
) -> tuple[list[Trial[int, list[float]]], list[int]]:
    """Run all workers' trials against a clock; return them, and the plan of each iteration.

    As control does it: what an iteration takes is said in the next one, and heard after that.
    """
    trials = [plan_trial(count, rank, range(size)) for rank in range(size)]
    known, said = [0.0] * size, [[0.0, 0.0]] * size
    used: list[int] = []
    for _ in range(most):
        changed = {t.process_rows(said) for t in trials}
        assert len(changed) == 1
        assert len({(t.candidate, t.number, t.done, tuple(t._values)) for t in trials}) == 1
        if trials[0].done:
            return trials, used
        if changed == {True}:
            known = [0.0] * size
        said = [t.report(lap) for t, lap in zip(trials, known, strict=True)]
        used.append(trials[0].candidate)
        known = [seconds(rank, used[-1]) for rank in range(size)]
    raise AssertionError("no decision")


@pytest.mark.parametrize("best", [0, 1, 2])
def test_plan_trial_keeps_fastest(best: int) -> None:
    trials, _ = decide(lambda _, plan: 1.0 if plan == best else 1.03, 3)
    assert [t.candidate for t in trials] == [best, best]


def test_plan_trial_single_plan_is_not_measured() -> None:
    assert plan_trial(1, 0, range(2)).done


def test_plan_trial_much_slower_plan_is_measured_once() -> None:
    trials, used = decide(lambda _, plan: (1.0, 1.5, 2.0)[plan], 3)
    assert trials[0].candidate == 0
    assert trials[0].result == [1.0, 1.5, 2.0]
    assert trials[0].number == 3
    assert len(used) == 3 * (BLOCK + LAG)


def test_plan_trial_noisy_plan_remains() -> None:
    """The second is a tenth faster, and its first block is disturbed."""
    seen = [0, 0]

    def seconds(_rank: int, plan: int) -> float:
        seen[plan] += 1
        disturbed = plan == 1 and seen[1] <= BLOCK + LAG and seen[1] % 3
        return (1.0, 0.9)[plan] * (1.5 if disturbed else 1.0)

    trials, used = decide(seconds, 2, size=1)
    assert trials[0].candidate == 1
    assert len(used) > 2 * (BLOCK + LAG)


def turns_of(used: list[int]) -> list[int]:
    return [plan for i, plan in enumerate(used) if i == 0 or plan != used[i - 1]]


def test_plan_trial_rounds_go_back_and_forth() -> None:
    """The noise of a tenth hides differences of 3 per cent, which are more than none."""
    laps = itertools.cycle([0.9, 1.0, 1.1])
    trials, used = decide(lambda _, plan: (1.0, 1.03, 1.03)[plan] * next(laps), 3, size=1)
    assert turns_of(used) == [0, 1, 2, 1, 0, 1, 2]
    assert trials[0].candidate == 0


def test_plan_trial_equal_plans_end_after_second_round() -> None:
    laps = itertools.cycle([0.9, 1.0, 1.1])
    trials, used = decide(lambda _, plan: (1.0, 1.005)[plan] * next(laps), 2, size=1)
    assert turns_of(used) == [0, 1, 0]
    assert trials[0].number == 4


def test_plan_trial_small_difference_without_noise_ends_after_first_round() -> None:
    """One of 3 per cent, in iterations that differ by 1 per cent."""
    laps = itertools.cycle([1.0, 1.005, 1.01])
    trials, used = decide(lambda _, plan: (1.03, 1.0)[plan] * next(laps), 2, size=1)
    assert trials[0].candidate == 1
    assert turns_of(used) == [0, 1]


def test_plan_trial_slowing_machine_affects_all_plans() -> None:
    """A drift of 40 per cent over the trial is far more than what the plans differ by."""
    count = iter(range(100_000))
    trials, _ = decide(lambda _, plan: (1 + 1e-3 * next(count)) * (1.0, 0.96, 1.04)[plan], 3)
    assert trials[0].candidate == 1


def test_plan_trial_outlier_iterations_do_not_decide() -> None:
    dice = random.Random(3)
    trials, _ = decide(
        lambda _, plan: (1.0, 0.96)[plan] * (20.0 if dice.random() < 0.1 else 1.0), 2, size=1
    )
    assert trials[0].candidate == 1


def test_plan_trial_mean_of_workers_counts() -> None:
    """Each says what its own iterations took; in lockstep one that waits longer began sooner."""
    trials, _ = decide(lambda rank, plan: (0.5 if rank else 1.5) + (0.0, 0.1)[plan], 2)
    assert trials[0].candidate == 0
    assert trials[0].result is not None
    assert trials[0].result[0] == 1.0


@given(st.data())
@settings(deadline=None, max_examples=examples(150))
def test_plan_trial_workers_agree_within_noise_and_trial_ends(data: st.DataObject) -> None:
    times = data.draw(st.lists(st.floats(0.01, 10.0), min_size=1, max_size=5), label="times")
    noise = data.draw(st.sampled_from([0.0, 0.004, 0.05, 0.5]), label="noise")
    size = data.draw(st.integers(1, 4), label="workers")
    dice = random.Random(data.draw(st.integers(0, 2**32), label="seed"))
    trials, used = (
        decide(lambda _, plan: times[plan] * (1 + dice.uniform(-noise, noise)), len(times), size)
        if len(times) > 1
        else ([plan_trial(1, 0, range(1))], [])
    )
    assert all(t.done for t in trials)
    assert len({t.candidate for t in trials}) == 1
    # Each plan at most one block a round, and at most so many rounds.
    assert trials[0].number <= ROUNDS * len(times)
    assert len(used) <= ROUNDS * len(times) * (BLOCK + LAG)
    # A plan was left behind for one that seemed faster, at most as often as there are others.
    doubt = ((1 + noise) / (1 - noise)) ** max(1, len(times) - 1)
    assert times[trials[0].candidate] <= min(times) * doubt * (1 + 1e-9)


@given(st.data())
@settings(deadline=None, max_examples=examples(100))
def test_plan_trial_any_history_workers_agree(data: st.DataObject) -> None:
    """Laps that are not known, those of a worker without batches: whatever rows come, all agree."""
    size, count = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 4))
    trials = [plan_trial(count, rank, range(size)) for rank in range(size)]
    dice = random.Random(data.draw(st.integers(0, 2**32)))
    known = data.draw(st.floats(0.7, 1.0))
    for _ in range(5_000):
        laps = [dice.uniform(0.5, 5.0) if dice.random() < known else 0.0 for _ in trials]
        rows = [t.report(lap) for t, lap in zip(trials, laps, strict=True)]
        heard = {t.process_rows(rows) for t in trials}
        assert len(heard) == 1
        assert len({(t.candidate, t.number, t.done) for t in trials}) == 1
        if trials[0].done:
            break
    assert trials[0].done
    assert trials[0].result is not None
    assert trials[0].result[trials[0].candidate] < float("inf")


def test_plan_trial_unknown_and_outdated_times_do_not_count() -> None:
    one = plan_trial(2, 0, range(2))
    for rows in ([[0.0, 0.0], [1.0, 0.0]], [[1.0, 0.0], [1.0, 1.0]]):
        for _ in range(2 * BLOCK):
            assert not one.process_rows(rows)
    assert one._values == []
    assert one.number == 0


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf"), 1e12])
def test_plan_trial_invalid_time_is_not_reported(seconds: float) -> None:
    assert plan_trial(2, 0, range(1)).report(seconds) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([[1.0, 0.0]], "rank 1: the exchange"),
        ([[1.0, 0.0], [1.0]], "rank 1: rank 3 sent"),
        ([[1.0, 0.0], [float("nan"), 0.0]], "rank 1: rank 3 sent"),
        ([[1.0, 0.0], [-1.0, 0.0]], "rank 1: rank 3 sent"),
        ([[1.0, 0.0], [1e12, 0.0]], "rank 1: rank 3 sent"),
        ([[1.0, 0.0], [1.0, 99.0]], "rank 1: rank 3 sent"),
    ],
)
def test_plan_trial_malformed_rows_of_a_column_are_refused(
    rows: list[list[float]], said: str
) -> None:
    with pytest.raises(PeerError, match=said):
        plan_trial(2, 0, (1, 3)).process_rows(rows)
