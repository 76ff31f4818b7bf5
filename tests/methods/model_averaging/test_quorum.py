"""Rounds with a quorum and a grace window, and what a worker has in them that was late."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.amounts import examples
from helpers.quorum_simulation import QuorumGame
from wingbeat.errors import UsageError
from wingbeat.methods.model_averaging.generator import Generator, Run
from wingbeat.methods.model_averaging.rules import Rules, Unmerged, weight_of
from wingbeat.types import Layout


def generator(workers: int, quorum: int, grace: float) -> Generator:
    return Generator(Layout.even(1, workers), Rules.all_workers(quorum, grace))


def ask(machine: Generator, *workers: int) -> list[Run]:
    return [run for worker in workers for run in machine.request(worker)]


def test_a_quorum_waits_for_the_others_until_its_grace_ends() -> None:
    machine = generator(4, quorum=3, grace=2.0)
    assert ask(machine, 0, 1) == []
    assert machine.take_late(5.0) == []
    assert machine.due is None, "there is no quorum"
    assert ask(machine, 2) == []
    assert machine.take_late(6.0) == []
    assert machine.due == 8.0
    assert machine.take_late(7.9) == []
    assert machine.take_late(8.0) == [3]
    (run,) = machine.mark_late(3)
    assert run.members == (0, 1, 2)
    assert machine.due is None


def test_a_round_of_all_workers_waits_for_no_grace() -> None:
    machine = generator(3, quorum=1, grace=60.0)
    (run,) = ask(machine, 0, 1, 2)
    assert run.members == (0, 1, 2)


def test_the_grace_begins_anew_with_another_quorum() -> None:
    machine = generator(4, quorum=2, grace=2.0)
    ask(machine, 0, 1)
    machine.take_late(0.0)
    machine.remove(1)
    machine.take_late(1.0)
    assert machine.due is None
    ask(machine, 2)
    assert machine.take_late(5.0) == []
    assert machine.due == 7.0


def test_without_grace_a_quorum_runs_at_once() -> None:
    machine = generator(3, quorum=2, grace=0.0)
    ask(machine, 1, 2)
    assert machine.take_late(1.0) == [0]


def test_a_worker_that_copies_a_state_is_waited_for() -> None:
    machine = generator(3, quorum=2, grace=1.0)
    machine.mark_late(2)
    assert ask(machine, 0) == []
    machine.add(2, at_once=True)
    assert ask(machine, 1) == []
    assert machine.take_late(0.0) == machine.take_late(9.0) == []
    (run,) = ask(machine, 2)
    assert sorted(run.members) == [0, 1, 2]


def test_a_round_below_the_quorum_waits_until_a_worker_returns() -> None:
    machine = generator(3, quorum=3, grace=1.0)
    assert ask(machine, 0, 1) == []
    assert machine.remove(2) == [], "two of three are no quorum"
    assert machine.take_late(100.0) == []
    machine.add(2, at_once=True)
    (run,) = ask(machine, 2)
    assert sorted(run.members) == [0, 1, 2]


def test_a_quorum_needs_no_worker_that_has_left_or_synchronizes() -> None:
    machine = generator(3, quorum=3, grace=1.0)
    ask(machine, 0, 1)
    (run,) = machine.remove(2, left=True)
    assert run.members == (0, 1)
    machine = generator(3, quorum=3, grace=1.0)
    ask(machine, 0, 1)
    (run,) = machine.synchronize(2)
    assert run.members == (0, 1)


def test_a_member_that_dies_in_a_round_leaves_it_below_the_quorum() -> None:
    machine = generator(3, quorum=3, grace=1.0)
    (run,) = ask(machine, 0, 1, 2)
    assert machine.remove(1) == []
    machine.add(1, at_once=True)
    (again,) = machine.request(1)
    assert (again.number, again.epoch, sorted(again.members)) == (run.number, 1, [0, 1, 2])
    machine = generator(3, quorum=2, grace=1.0)
    ask(machine, 0, 1, 2)
    (again,) = machine.remove(1)
    assert again.members == (0, 2), "still a quorum"


def test_a_worker_that_has_the_average_does_not_wait_for_a_quorum_of_the_rest() -> None:
    machine = generator(3, quorum=3, grace=1.0)
    (run,) = ask(machine, 0, 1, 2)
    machine.acknowledge(0, run.number)
    (again,) = machine.remove(1)
    assert again.members == (2,), "worker 0 has the average of all, and so must 2"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"quorum": 0, "whole": True}, "Rules(quorum=0, whole=True): allowed are 1 worker"),
        ({"quorum": 2}, "groups of all workers"),
        ({"grace": -1.0}, "allowed are 0 seconds and more"),
        ({"grace": 1.0}, "after a quorum"),
    ],
)
def test_rules_that_cannot_work_are_refused(given: dict, said: str) -> None:
    with pytest.raises(UsageError) as raised:
        Rules(**given)
    assert said in str(raised.value)


@settings(max_examples=examples(300))
@given(
    st.integers(1, 7),
    st.integers(1, 7),
    st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    st.integers(0, 1 << 30),
    st.integers(0, 5),
)
def test_random_histories_have_quorums_within_the_grace_and_lose_no_token(
    workers: int, quorum: int, grace: float, seed: int, kills: int
) -> None:
    QuorumGame(workers, min(quorum, workers), grace, seed, kills=kills).play()


# -- weights -----------------------------------------------------------------------------------


def test_tokens_counted_during_an_average_belong_to_the_next() -> None:
    counts = Unmerged(2, "tokens")
    counts.count(7)
    counts.step()
    assert counts.offer(0, 1) == (7, 1)
    counts.count(5)
    counts.step()
    counts.merged()
    counts.merged()
    assert counts.counted == [(5, 1), (12, 2)]
    assert counts.offer(0, 2) == (12, 2)


def test_counts_of_an_average_that_was_not_made_are_kept() -> None:
    counts = Unmerged(1, "tokens")
    counts.count(7)
    counts.offer(0, 1)
    counts.count(1)
    assert counts.offer(0, 1) == (8, 0)
    counts.merged()
    assert counts.counted == [(0, 0)]


def test_counts_of_another_number_of_fragments_are_the_largest() -> None:
    counts = Unmerged(3, "tokens")
    counts.load([[4, 1], [9, 2]])
    assert counts.counted == [(9, 2)] * 3
    counts.load([])
    assert counts.counted == [(0, 0)] * 3


def test_the_weights_of_a_worker_that_has_made_no_step_are_zero() -> None:
    assert weight_of("tokens", 0, 0) == weight_of("decoupled", 0, 0) == 0.0
