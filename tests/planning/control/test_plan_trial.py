"""Which plan is the fastest, decided in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wingbeat.errors import PeerError
from wingbeat.planning.control import plan_trial
from wingbeat.planning.control.plan_trial import PlanTrial

BLOCK = plan_trial.SETTLING + plan_trial.LAPS
ROUNDS = len(plan_trial.BEHIND)
LAG = 1
"""Iterations from a change of plan until the first one with it is heard of."""

Seconds = Callable[[int, int], float]


def decide(
    seconds: Seconds, count: int, size: int = 2, most: int = 10_000
) -> tuple[list[PlanTrial], list[int]]:
    """Run all workers' trials against a clock; return them, and the plan of each iteration.

    As control does it: what an iteration takes is said in the next one, and heard after that.
    """
    trials = [PlanTrial(count, rank, size) for rank in range(size)]
    known, said = [0.0] * size, [[0.0, 0.0]] * size
    used: list[int] = []
    for _ in range(most):
        changed = {t.take(said) for t in trials}
        assert len(changed) == 1
        assert len({(t.plan, t.block, t.done, tuple(map(tuple, t.laps))) for t in trials}) == 1
        if trials[0].done:
            return trials, used
        if changed == {True}:
            known = [0.0] * size
        said = [t.report(lap) for t, lap in zip(trials, known, strict=True)]
        used.append(trials[0].plan)
        known = [seconds(rank, used[-1]) for rank in range(size)]
    raise AssertionError("no decision")


@pytest.mark.parametrize("best", [0, 1, 2])
def test_the_fastest_stays(best: int) -> None:
    trials, _ = decide(lambda _, plan: 1.0 if plan == best else 1.03, 3)
    assert [t.plan for t in trials] == [best, best]


def test_a_single_plan_is_not_tried() -> None:
    assert PlanTrial(1, 0, 2).done


def test_what_is_far_behind_is_tried_once() -> None:
    trials, used = decide(lambda _, plan: (1.0, 1.5, 2.0)[plan], 3)
    assert trials[0].plan == 0
    assert [len(laps) for laps in trials[0].laps] == [plan_trial.LAPS] * 3
    assert len(used) == 3 * (BLOCK + LAG)


def test_what_noise_makes_slower_stays_in() -> None:
    """The second is a tenth faster, and its first block is disturbed."""
    seen = [0, 0]

    def seconds(_rank: int, plan: int) -> float:
        seen[plan] += 1
        disturbed = plan == 1 and seen[1] <= BLOCK + LAG and seen[1] % 3
        return (1.0, 0.9)[plan] * (1.5 if disturbed else 1.0)

    trials, used = decide(seconds, 2, size=1)
    assert trials[0].plan == 1
    assert len(used) > 2 * (BLOCK + LAG)


def test_plans_take_turns_to_and_fro() -> None:
    _, used = decide(lambda *_: 1.0, 3)
    turns = [plan for i, plan in enumerate(used) if i == 0 or plan != used[i - 1]]
    assert turns == [0, 1, 2, 1, 0, 1, 2, 1, 0]


def test_a_machine_that_becomes_slower_does_so_for_all() -> None:
    """A drift of 40 per cent over the trial is far more than what the plans differ by."""
    count = iter(range(100_000))
    trials, _ = decide(lambda _, plan: (1 + 1e-3 * next(count)) * (1.0, 0.96, 1.04)[plan], 3)
    assert trials[0].plan == 1


def test_a_few_disturbed_iterations_do_not_decide() -> None:
    dice = random.Random(3)
    trials, _ = decide(
        lambda _, plan: (1.0, 0.96)[plan] * (20.0 if dice.random() < 0.1 else 1.0), 2, size=1
    )
    assert trials[0].plan == 1


def test_workers_who_are_slower_than_others_count_as_much() -> None:
    """Each says what its own iterations took; in lockstep one that waits longer began sooner."""
    trials, _ = decide(lambda rank, plan: (0.5 if rank else 1.5) + (0.0, 0.1)[plan], 2)
    assert trials[0].plan == 0
    assert trials[0].laps[0][0] == 1.0


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_all_choose_the_same_within_noise_of_the_best_and_it_ends(data: st.DataObject) -> None:
    times = data.draw(st.lists(st.floats(0.01, 10.0), min_size=1, max_size=5), label="times")
    noise = data.draw(st.sampled_from([0.0, 0.004, 0.05, 0.5]), label="noise")
    size = data.draw(st.integers(1, 4), label="workers")
    dice = random.Random(data.draw(st.integers(0, 2**32), label="seed"))
    trials, used = (
        decide(lambda _, plan: times[plan] * (1 + dice.uniform(-noise, noise)), len(times), size)
        if len(times) > 1
        else ([PlanTrial(1, 0, 1)], [])
    )
    assert all(t.done for t in trials)
    assert len({t.plan for t in trials}) == 1
    # Each plan at most one block a round, and at most so many rounds.
    assert trials[0].block <= ROUNDS * len(times)
    assert len(used) <= ROUNDS * len(times) * (BLOCK + LAG)
    # A plan was left behind for one that seemed faster, at most as often as there are others.
    doubt = ((1 + noise) / (1 - noise)) ** max(1, len(times) - 1)
    assert times[trials[0].plan] <= min(times) * doubt * (1 + 1e-9)


@given(st.data())
@settings(deadline=None, max_examples=100)
def test_any_histories_lead_all_to_the_same(data: st.DataObject) -> None:
    """Laps that are not known, those of a worker without batches: whatever rows come, all agree."""
    size, count = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 4))
    trials = [PlanTrial(count, rank, size) for rank in range(size)]
    dice = random.Random(data.draw(st.integers(0, 2**32)))
    known = data.draw(st.floats(0.7, 1.0))
    for _ in range(5_000):
        laps = [dice.uniform(0.5, 5.0) if dice.random() < known else 0.0 for _ in trials]
        rows = [t.report(lap) for t, lap in zip(trials, laps, strict=True)]
        heard = {t.take(rows) for t in trials}
        assert len(heard) == 1
        assert len({(t.plan, t.block, t.done) for t in trials}) == 1
        if trials[0].done:
            break
    assert trials[0].done
    assert trials[0].medians[trials[0].plan] < float("inf")


def test_unknown_laps_and_those_of_another_block_do_not_count() -> None:
    one = PlanTrial(2, 0, 2)
    for rows in ([[0.0, 0.0], [1.0, 0.0]], [[1.0, 0.0], [1.0, 1.0]]):
        for _ in range(2 * BLOCK):
            assert not one.take(rows)
    assert one.laps == [[], []]
    assert one.block == 0


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf"), 1e12])
def test_what_is_no_time_is_not_said(seconds: float) -> None:
    assert PlanTrial(2, 0, 1).report(seconds) == [0.0, 0.0]


@pytest.mark.parametrize(
    "rows",
    [
        [[1.0, 0.0]],
        [[1.0, 0.0], [1.0]],
        [[1.0, 0.0], [float("nan"), 0.0]],
        [[1.0, 0.0], [-1.0, 0.0]],
        [[1.0, 0.0], [1e12, 0.0]],
        [[1.0, 0.0], [1.0, 99.0]],
    ],
)
def test_malformed_rows_are_refused(rows: list[list[float]]) -> None:
    with pytest.raises(PeerError, match="rank 0: "):
        PlanTrial(2, 0, 2).take(rows)
