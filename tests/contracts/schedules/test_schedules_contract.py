"""What every schedule keeps to, in thousands of histories of several workers.

A new schedule is one line in `wingbeat.schedules.BY_NAME`, and it is here.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.amounts import examples
from wingbeat import schedules
from wingbeat.schedules.events import GradientsDropped, ParametersNeeded, Phase, Planned
from wingbeat.schedules.intents import Intent

from .play import AP, RS, Worker, iteration, planned, together

HISTORIES = 50
"""Histories for each number of hypothesis: to choose one takes as long as to play it."""

ALIKE = {"sharded", "served_updates", "served_updates_at_start"}
"""Schedules under which all workers have to do the same with their gradients."""


def history(name: str, seed: int) -> list[Worker]:
    """Let up to three workers train as they like for some iterations; they must stay in step."""
    chooser = random.Random(seed)
    plan, size = planned(chooser), chooser.randint(1, 3)
    workers = [Worker(schedules.BY_NAME[name](), plan) for _ in range(size)]
    for number in range(chooser.randint(1, 4)):
        histories = [
            iteration(
                plan,
                random.Random(seed + number),
                random.Random(seed + 31 * number + rank),
                alike=name in ALIKE,
            )
            for rank in range(size)
        ]
        together(workers, histories)
        assert all(worker.schedule.phase is Phase.IDLE for worker in workers)
    return workers


def seeds(first: int) -> range:
    return range(HISTORIES * first, HISTORIES * (first + 1))


@pytest.mark.parametrize("name", schedules.BY_NAME)
@settings(max_examples=examples(3000 // HISTORIES))
@given(first=st.integers(0, 10**8))
def test_whatever_users_do_workers_start_the_same_operations(name: str, first: int) -> None:
    for seed in seeds(first):
        workers = history(name, seed)
        together(workers, [[GradientsDropped()]] * len(workers))
        assert all(worker.started == workers[0].started for worker in workers), seed


@pytest.mark.parametrize("name", schedules.BY_NAME)
@settings(max_examples=examples(500 // HISTORIES))
@given(first=st.integers(0, 10**8))
def test_all_that_is_due_is_made_in_the_end(name: str, first: int) -> None:
    for seed in seeds(first):
        workers = history(name, seed)
        every = ParametersNeeded(tuple(range(len(workers[0].members))))
        together(workers, [[every]] * len(workers))
        assert not any(worker.due for worker in workers), seed


@pytest.mark.parametrize("name", schedules.BY_NAME)
def test_a_plan_may_change_between_two_iterations(name: str) -> None:
    first = Planned((1, 0), (frozenset({0}), frozenset({1})))
    workers = [Worker(schedules.BY_NAME[name](), first) for _ in range(2)]
    for number in range(6):
        plan = first if number % 2 else Planned((0,), (frozenset({0, 1}),))
        for rank, worker in enumerate(workers):
            together([worker], [[ParametersNeeded((0, 1))]])
            worker.members = plan.members
            assert not list(worker.schedule.react(plan)), f"rank {rank} did more than take note"
        every = [
            iteration(plan, random.Random(number), random.Random(rank), alike=True)
            for rank in range(2)
        ]
        together(workers, every)
    assert workers[0].started == workers[1].started


@pytest.mark.parametrize("name", sorted(ALIKE))
@settings(max_examples=examples(2000 // HISTORIES))
@given(first=st.integers(0, 10**8))
def test_workers_without_batches_stay_in_step_where_all_agree(name: str, first: int) -> None:
    for seed in seeds(first):
        with_followers(name, seed)


def with_followers(name: str, seed: int) -> None:
    """Let some workers train without a batch; all must do the same."""
    chooser = random.Random(seed)
    plan, size = planned(chooser), chooser.randint(2, 4)
    followers = chooser.randint(1, size - 1)
    workers = [Worker(schedules.BY_NAME[name](), plan) for _ in range(size)]
    for number in range(chooser.randint(1, 4)):
        histories = [
            iteration(
                plan,
                random.Random(seed + number),
                random.Random(seed + 31 * number + rank),
                alike=True,
                follower=rank < followers,
                accumulates=False,
            )
            for rank in range(size)
        ]
        answers = together(workers, histories)
        assert all(worker.started == workers[0].started for worker in workers)
        assert all(worker.due == workers[0].due for worker in workers)
        assert all(worker.shared == workers[0].shared for worker in workers)
        if Intent.STEP in answers[-1].doing:
            used = answers[-1].used
            for worker in workers:
                assert sorted(worker.updated) == [(b, used & m) for b, m in enumerate(plan.members)]
                due = {b: used & m for b, m in enumerate(plan.members)}
                assert worker.due == (
                    due if name != "sharded" else {b: m for b, m in due.items() if m}
                )
    if name != "sharded":
        return
    reduced = sum(operation is RS for operation, _ in workers[0].started)
    assert reduced >= sum(operation is AP for operation, _ in workers[0].started)
