"""The order of partitions: rank 0's decisions, and workers that follow them, in virtual time."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.amounts import examples
from wingbeat.schema import MalformedMessage
from wingbeat.simulator.agenda import Agenda
from wingbeat_lab.bytescheduler.order import (
    MAX_EARLY,
    Follower,
    Leader,
    Machine,
    Partition,
    divide,
)

SIZES = ((4, 4, 2), (3,), (4, 4), (1,))
"""Bytes of each partition of four buckets, numbered in the order in which they become ready."""

FORWARD = (3, 2, 1, 0)


def leader(credit: int, forward: Sequence[int] = FORWARD) -> Leader:
    made = Leader(credit)
    made.plan(SIZES, forward)
    return made


def follower() -> Follower:
    made = Follower()
    made.plan(SIZES, FORWARD)
    return made


def places(partitions: Sequence[Partition]) -> list[tuple[int, int]]:
    return [(each.bucket, each.number) for each in partitions]


# -- rank 0 -------------------------------------------------------------------------------


def test_leader_starts_partitions_of_the_first_needed_bucket_first() -> None:
    made = leader(credit=4)
    started = made.ready(0)
    assert places(started) == [(0, 0)]
    for bucket in (1, 2, 3):
        assert made.ready(bucket) == [], "the credit is in use"
    order = []
    while started:
        order += places(started)
        started = made.summed(started[0])
    assert order == [(0, 0), (3, 0), (2, 0), (2, 1), (1, 0), (0, 1), (0, 2)]


def test_leader_starts_as_many_bytes_as_the_credit_allows() -> None:
    made = leader(credit=9)
    assert places(made.ready(0)) == [(0, 0), (0, 1)]
    assert made.ready(3) == [(1, 0, 3, 0)], "4 + 4 + 1 bytes are the credit"
    assert made.ready(1) == []
    assert made.summed(Partition(1, 0, 3, 0)) == [], "3 bytes more would exceed the credit"
    assert places(made.summed(Partition(1, 0, 0, 0))) == [(1, 0), (0, 2)]


def test_leader_starts_a_partition_that_exceeds_the_credit_alone() -> None:
    made = leader(credit=1)
    first = made.ready(0)
    assert places(first) == [(0, 0)]
    assert made.ready(3) == []
    assert places(made.summed(first[0])) == [(3, 0)]


def test_leader_counts_rounds_of_each_bucket_and_plans() -> None:
    made = leader(credit=100)
    for number in range(3):
        assert made.ready(1) == [(1, number, 1, 0)]
        made.summed(Partition(1, number, 1, 0))
    made.plan(((5,),), (0,))
    assert made.ready(0) == [(2, 0, 0, 0)]


# -- the others ---------------------------------------------------------------------------


def test_follower_starts_named_partitions_once_their_gradients_are_ready() -> None:
    made = follower()
    assert made.name(Partition(1, 0, 1, 0)) == []
    assert made.name(Partition(1, 0, 0, 1)) == []
    assert made.ready(0) == [], "a partition of bucket 1 was named before"
    assert places(made.ready(1)) == [(1, 0), (0, 1)]
    assert places(made.name(Partition(1, 0, 0, 0))) == [(0, 0)]


def test_follower_keeps_the_next_round_until_its_gradients_are_ready() -> None:
    made = follower()
    made.ready(3)
    assert made.name(Partition(1, 0, 3, 0)) == [(1, 0, 3, 0)]
    assert made.name(Partition(1, 1, 3, 0)) == []
    assert made.ready(3) == [(1, 1, 3, 0)]


def test_follower_keeps_names_of_the_next_plan() -> None:
    made = follower()
    assert made.name(Partition(2, 0, 0, 0)) == []
    made.plan(((5, 5),), (0,))
    assert made.ready(0) == [(2, 0, 0, 0)]
    assert made.name(Partition(2, 0, 0, 1)) == [(2, 0, 0, 1)]


@pytest.mark.parametrize(
    ("named", "words"),
    [
        (Partition(1, 0, 4, 0), "partition 0 of bucket 4: there are 4 buckets"),
        (Partition(1, 0, 0, 3), "partition 3 of bucket 0, which has 3 partitions"),
        (Partition(1, 0, 0, 1), "partition 1 of bucket 0 is named twice"),
        (Partition(1, 0, 3, 0), "partition 0 of bucket 3 in round 0; round 1 is due"),
        (Partition(1, 1, 0, 0), "partition 0 of bucket 0 in round 1; round 0 is due"),
        (Partition(0, 0, 0, 0), "partition 0 of bucket 0 of plan 0; this worker has plan 1"),
        (Partition(3, 0, 0, 0), "partition 0 of bucket 0 of plan 3; this worker has plan 1"),
    ],
)
def test_follower_refuses_a_name_that_is_not_due(named: Partition, words: str) -> None:
    made = follower()
    made.name(Partition(1, 0, 0, 1))
    made.name(Partition(1, 0, 3, 0))
    with pytest.raises(MalformedMessage) as caught:
        made.name(named)
    assert str(caught.value) == words


def test_follower_refuses_a_name_of_the_next_plan_that_the_plan_does_not_have() -> None:
    made = follower()
    made.name(Partition(2, 0, 1, 0))
    with pytest.raises(MalformedMessage, match="there are 1 buckets"):
        made.plan(((5, 5),), (0,))


def test_follower_limits_the_names_that_it_keeps_for_the_next_plan() -> None:
    made = follower()
    for number in range(MAX_EARLY):
        made.name(Partition(2, 0, 0, number))
    with pytest.raises(MalformedMessage, match="of plan 2; this worker has plan 1"):
        made.name(Partition(2, 0, 0, MAX_EARLY))


Names = st.lists(
    st.builds(
        Partition, st.integers(0, 3), st.integers(0, 2), st.integers(0, 5), st.integers(0, 4)
    ),
    max_size=30,
)


@settings(deadline=None, max_examples=examples(500))
@given(Names, st.lists(st.integers(0, 3), max_size=8))
def test_follower_starts_nothing_twice_and_nothing_unknown(
    names: list[Partition], ready: list[int]
) -> None:
    made, rounds = follower(), Counter[int]()
    started: list[Partition] = []
    for name, bucket in itertools.zip_longest(names, ready):
        if bucket is not None:
            rounds[bucket] += 1
            started += made.ready(bucket)
        if name is not None:
            with contextlib.suppress(MalformedMessage):
                started += made.name(name)
    assert len(started) == len(set(started))
    for each in started:
        assert each.plan == 1
        assert each.round < rounds[each.bucket], f"{each} is not ready"
        assert each.number < len(SIZES[each.bucket])


# -- both, in virtual time ----------------------------------------------------------------


class Worker:
    """One worker's training thread: its buckets become ready at random, and wait for their sums."""

    def __init__(self, job: Job, rank: int, machine: Machine) -> None:
        self.job, self.rank, self.machine = job, rank, machine
        self.started: list[Partition] = []
        self.ready: set[tuple[int, int]] = set()
        self.sums: Counter[tuple[int, int]] = Counter()
        self.iteration = 0

    def begin(self) -> None:
        """Make all buckets of an iteration ready, in their order, at random times."""
        if self.iteration == self.job.iterations:
            return
        when, plan = self.job.agenda.now, self.job.plans[self.iteration]
        if self.iteration and plan is not self.job.plans[self.iteration - 1]:
            self.use(plan)
        for bucket in range(len(plan)):
            when += self.job.chance.random()
            self.job.agenda.at(when, partial(self._ready, bucket))

    def use(self, plan: Sequence[Sequence[int]]) -> None:
        self.machine.plan(plan, self.job.forward(plan))
        self.ready.clear()
        self.sums.clear()

    def _ready(self, bucket: int) -> None:
        self.ready.add((self.round, bucket))
        self.start(self.machine.ready(bucket))

    @property
    def round(self) -> int:
        plans = self.job.plans[: self.iteration]
        return sum(each is self.job.plans[self.iteration] for each in plans)

    def start(self, partitions: Sequence[Partition]) -> None:
        for each in partitions:
            assert (each.round, each.bucket) in self.ready, f"{each} is not ready"
            self.started.append(each)
            self.job.start(self, each)

    def complete(self, each: Partition) -> None:
        key = each.round, each.bucket
        self.sums[key] += 1
        self.start(self.machine.summed(each))
        plan = self.job.plans[self.iteration]
        if sum(self.sums[self.round, b] == len(plan[b]) for b in range(len(plan))) == len(plan):
            self.iteration += 1
            self.begin()


class Job:
    """Some workers, rank 0's messages to the others, and all-reduces, one after the other."""

    def __init__(
        self,
        workers: int,
        credit: int,
        plans: Sequence[Sequence[Sequence[int]]],
        chance: random.Random,
    ) -> None:
        self.agenda, self.chance = Agenda(), chance
        self.plans, self.iterations, self.credit = plans, len(plans), credit
        machines: list[Machine] = [Leader(credit), *(Follower() for _ in range(workers - 1))]
        self.workers = [Worker(self, rank, machine) for rank, machine in enumerate(machines)]
        self.begun: Counter[Partition] = Counter()
        self.in_flight: list[Partition] = []
        self.most = 0
        self._last = [0.0] * workers
        for worker in self.workers:
            worker.use(plans[0])
            worker.begin()
        self.agenda.run()

    @staticmethod
    def forward(plan: Sequence[Sequence[int]]) -> list[int]:
        return list(reversed(range(len(plan))))

    def start(self, worker: Worker, each: Partition) -> None:
        if worker.rank == 0:
            self._check_order(each)
            self.in_flight.append(each)
            for other in self.workers[1:]:
                # Messages between two workers arrive in order.
                when = max(self._last[other.rank], self.agenda.now + self.chance.random())
                self._last[other.rank] = when
                self.agenda.at(when, partial(self._name, other, each))
        self.begun[each] += 1
        if self.begun[each] == len(self.workers):
            for other in self.workers:
                when = self.agenda.now + self.chance.random()
                self.agenda.at(when, partial(self._complete, other, each))

    def _name(self, worker: Worker, each: Partition) -> None:
        machine = worker.machine
        assert isinstance(machine, Follower)
        worker.start(machine.name(each))

    def _complete(self, worker: Worker, each: Partition) -> None:
        if worker.rank == 0:
            self.in_flight.remove(each)
        worker.complete(each)

    def _check_order(self, started: Partition) -> None:
        """No partition that rank 0 could start instead is needed earlier, and the credit is kept.

        All partitions of an iteration's ready buckets that have not started are in the queue.
        """
        leader = self.workers[0]
        plan = self.plans[leader.iteration]
        size = sum(plan[p.bucket][p.number] for p in (*self.in_flight, started))
        assert not self.in_flight or size <= self.credit, "more in flight than the credit"
        self.most = max(self.most, size)
        place = {bucket: place for place, bucket in enumerate(self.forward(plan))}
        before = {(p.plan, p.round, p.bucket, p.number) for p in leader.started}
        for round_, bucket in leader.ready:
            if round_ != started.round:
                continue
            for number in range(len(plan[bucket])):
                waiting = started._replace(bucket=bucket, number=number) not in before
                earlier = (place[bucket], number) < (place[started.bucket], started.number)
                assert not (waiting and earlier), f"{started} before {number} of {bucket}"


Plans = st.lists(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=6),
    min_size=1,
    max_size=2,
)


@settings(deadline=None, max_examples=examples(300))
@given(st.integers(1, 4), st.integers(1, 20), Plans, st.integers(1, 3), st.integers(0, 2**32))
def test_workers_start_all_partitions_in_one_order_within_the_credit(
    workers: int, credit: int, plans: list[list[list[int]]], each: int, seed: int
) -> None:
    repeated = [plan for plan in plans for _ in range(each)]
    job = Job(workers, credit, repeated, random.Random(seed))
    wanted = sum(len(bucket) for plan in repeated for bucket in plan)
    for worker in job.workers:
        assert worker.iteration == len(repeated), f"rank {worker.rank} waits for ever"
        assert worker.started == job.workers[0].started
        assert len(set(worker.started)) == len(worker.started) == wanted


# -- partitions ---------------------------------------------------------------------------


@settings(deadline=None, max_examples=examples(300))
@given(st.integers(0, 5000), st.sampled_from([1, 2, 4, 8]), st.integers(1, 4000))
def test_partitions_cover_a_bucket_evenly_within_their_size(
    numel: int, itemsize: int, most: int
) -> None:
    spans = divide(numel, itemsize, most)
    assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
    assert spans[-1].stop == numel
    lengths = [len(span) for span in spans]
    assert max(lengths) - min(lengths) <= 1
    assert max(lengths) * itemsize <= max(most, itemsize)
    assert len(spans) == max(1, -(-numel // max(1, most // itemsize)))
