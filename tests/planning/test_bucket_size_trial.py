"""The tuner in virtual time: whoever is slow, early or wrong, no two workers ever disagree."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.amounts import examples
from wingbeat.errors import PeerError
from wingbeat.planning import bucket_size
from wingbeat.planning.bucket_size import WARMUP, BucketSizeResult, Sample, bucket_size_trial
from wingbeat.planning.trials import LedTrial
from wingbeat.types import Tuning

MB = 2**20
START = 25 * MB


def tuning(search: str = "grid", trials: int = 4, steps: int = 3, **kwargs: int) -> Tuning:
    limits = {"low_bytes": MB, "high_bytes": 100 * MB, **kwargs}
    return Tuning(search=search, trials=trials, steps=steps, **limits)


class Worker:
    """A tuner, what its engine does with it, and what came of it."""

    def __init__(self, rule: Tuning, rank: int, size: int, start: int = START) -> None:
        self.tuner = bucket_size_trial(rule, start, rank, range(size))
        self.size_now = start
        self.reported = self.taken = 0
        self.story: list[tuple[int, int | None, bool]] = []

    def process_rows(self, rows: Sequence[Sequence[float]]) -> None:
        setting = self.tuner.process_rows(rows)
        change = None if setting is None else setting[0]
        self.size_now = change or self.size_now
        self.story.append((self.taken, change, self.tuner.done))
        self.taken += 1


def play(workers: list[Worker], seconds: Callable[[int, int, int], float], pick: random.Random,
         lag: int) -> int:  # fmt: skip
    """Let workers report and take in any order that exchanges allow; returns their number.

    Each worker may be up to ``lag`` exchanges late in taking what it has reported to.
    """
    exchanges: list[list[list[float] | None]] = []
    for _ in range(200_000):
        moves: list[tuple[Worker, int, str]] = []
        for rank, worker in enumerate(workers):
            if worker.tuner.done:
                continue
            ready = worker.taken < len(exchanges) and None not in exchanges[worker.taken]
            if ready:
                moves.append((worker, rank, "take"))
            if worker.reported - worker.taken <= lag:
                moves.append((worker, rank, "report"))
        if not moves:
            return len(exchanges)
        worker, rank, what = pick.choice(moves)
        if what == "take":
            worker.process_rows([row for row in exchanges[worker.taken] if row is not None])
            continue
        if worker.reported == len(exchanges):
            exchanges.append([None] * len(workers))
        took = seconds(rank, worker.reported, worker.size_now)
        exchanges[worker.reported][rank] = worker.tuner.report(took)
        worker.reported += 1
    raise AssertionError("tuning did not end")


@settings(max_examples=examples(150))
@given(
    search=st.sampled_from(["grid", "random", "random", "bo"]),
    size=st.integers(1, 4),
    trials=st.integers(1, 6),
    steps=st.integers(1, 4),
    lag=st.integers(0, 2),
    start=st.sampled_from([MB // 2, MB, START, 100 * MB, 900 * MB]),
    seed=st.integers(0, 2**32),
)
def test_bucket_trial_workers_always_agree_and_trial_ends(
    search, size, trials, steps, lag, start, seed
):
    rule = tuning(search, trials, steps)
    workers = [Worker(rule, rank, size, start) for rank in range(size)]
    chance = random.Random(seed)
    times = [0.0, math.nan, -1.0, 1e-12, math.inf, 1e-9, 1e9]

    def seconds(rank: int, step: int, now: int) -> float:
        return chance.choice(times) if chance.random() < 0.2 else 10 ** chance.uniform(-4, 2)

    exchanges = play(workers, seconds, chance, lag)
    stories = [worker.story for worker in workers]
    assert all(story == stories[0] for story in stories)
    assert [done for _, _, done in stories[0]][-1] is True
    assert len({worker.size_now for worker in workers}) == 1
    for _, change, _ in stories[0]:
        assert change is None or change == start or MB <= change <= 100 * MB
    result = workers[0].tuner.result
    assert result is not None
    assert [worker.tuner.result for worker in workers[1:]] == [None] * (size - 1)
    assert len(result.samples) == len(result.decision_s) == trials
    assert result.samples[0].bucket_bytes == start
    assert workers[0].size_now == result.chosen_bytes
    # Each block of another size than the one before it begins with a warm-up.
    changes = sum(change is not None and not done for _, change, done in stories[0])
    assert exchanges >= trials * steps + (1 + changes) * WARMUP


def in_step(workers: list[Worker], seconds: Callable[[int, int], float], late: int = 0) -> int:
    """Iterate as an engine does, rows arriving ``late`` iterations later; how many it took.

    What is reported is the time of the iteration before, with the size that it had.
    """
    on_the_way: list[list[list[float]]] = []
    count = 0
    took = [0.0] * len(workers)
    while not workers[0].tuner.done:
        if len(on_the_way) > late:
            rows = on_the_way.pop(0)
            for worker in workers:
                worker.process_rows(rows)
        if workers[0].tuner.done:
            break
        on_the_way.append([w.tuner.report(t) for w, t in zip(workers, took, strict=True)])
        took = [seconds(count, worker.size_now) for worker in workers]
        count += 1
        assert count < 10_000
    return count


@pytest.mark.parametrize("late", [0, 1, 3])
def test_bucket_trial_iterations_with_previous_size_do_not_count(late: int) -> None:
    def seconds(count: int, size: int) -> float:
        return size / MB

    workers = [Worker(tuning(trials=5), rank, 2) for rank in range(2)]
    in_step(workers, seconds, late)
    result = workers[0].tuner.result
    assert result is not None
    for sample in result.samples:
        assert sample.iterations_per_s == pytest.approx(MB / sample.bucket_bytes)
    assert result.chosen_bytes == MB


def test_bucket_trial_takes_its_steps_and_warmup() -> None:
    workers = [Worker(tuning(trials=4, steps=7), 0, 1)]
    # The first row has no time yet, and each decision takes one exchange to arrive.
    assert in_step(workers, lambda count, size: 0.1) == 1 + 4 * (WARMUP + 7 + 1)


def test_bucket_trial_throughput_is_mean_of_workers_and_median_of_steps() -> None:
    tuners = [
        bucket_size_trial(tuning(trials=1, steps=3), START, rank, range(2)) for rank in range(2)
    ]
    for pair in [(9, 9), (9, 9), (0.5, 0.25), (0.2, 0.2), (1000, 1000)]:
        rows = [tuner.report(s) for tuner, s in zip(tuners, pair, strict=True)]
        for tuner in tuners:
            assert tuner.process_rows(rows) is None
    rows = [tuner.report(1) for tuner in tuners]
    assert [tuner.process_rows(rows) for tuner in tuners] == [None, None]
    assert all(tuner.done for tuner in tuners)
    assert tuners[0].result is not None
    assert tuners[0].result.samples == (Sample(START, 3.0),)


def test_bucket_trial_outlier_iterations_do_not_decide() -> None:
    def seconds(count: int, size: int) -> float:
        return (30.0 if count % 5 == 0 else 0) + 0.2 + abs(math.log2(size / (5 * MB))) / 10

    workers = [Worker(tuning(trials=10, steps=9), 0, 1)]
    in_step(workers, seconds)
    result = workers[0].tuner.result
    assert result is not None
    assert 4 * MB < result.chosen_bytes < 6 * MB
    assert all(sample.iterations_per_s > 1 for sample in result.samples)


def test_bucket_trial_worker_without_time_is_left_out() -> None:
    workers = [Worker(tuning(trials=1, steps=2), rank, 2) for rank in range(2)]
    for _ in range(WARMUP + 3):
        rows = [workers[0].tuner.report(0.5), workers[1].tuner.report(math.nan)]
        for worker in workers:
            worker.process_rows(rows)
    result = workers[0].tuner.result
    assert result is not None
    assert result.samples == (Sample(START, 2.0),)


THREE = ("ring", "mesh", "doubling")


@pytest.mark.parametrize("search", ["bo", "random", "grid"])
def test_bucket_trial_size_and_topology_change_together_on_all_workers(search: str) -> None:
    """Along a mesh iterations take half as long, and of no other size do they differ much."""
    rule = Tuning(
        search=search, low_bytes=MB, high_bytes=100 * MB, trials=10, steps=2, topologies=THREE
    )
    tuners = [bucket_size_trial(rule, START, rank, range(3), "ring") for rank in range(3)]
    stories: list[list[tuple[Any, str, bool]]] = [[] for _ in tuners]
    took = [0.0] * 3
    while not tuners[0].done:
        rows = [tuner.report(t) for tuner, t in zip(tuners, took, strict=True)]
        for tuner, story in zip(tuners, stories, strict=True):
            story.append((tuner.process_rows(rows), tuner.candidate[1], tuner.done))
        took = [0.1 if tuner.candidate[1] == "mesh" else 0.2 for tuner in tuners]
    assert stories[1] == stories[2] == stories[0]
    assert {topology for _, topology, _ in stories[0]} == set(THREE)
    result = tuners[0].result
    assert result is not None
    assert result.samples[0].topology == "ring"
    assert all(s.iterations_per_s == (10 if s.topology == "mesh" else 5) for s in result.samples)
    assert result.chosen_topology == tuners[2].candidate[1] == "mesh"
    assert result.gain == pytest.approx(2, rel=0.05)
    assert "x the throughput of the start (25 MB along ring)" in result.explain()
    assert f" {result.chosen_bytes / MB:.3g} MB along mesh, " in result.explain()


def test_bucket_trial_same_size_is_no_change() -> None:
    rule = tuning(low_bytes=START, high_bytes=START, trials=3, steps=1)
    worker = Worker(rule, 0, 1)
    in_step([worker], lambda count, size: 0.1)
    assert {change for _, change, _ in worker.story} == {None}
    assert worker.tuner.done


def test_bucket_trial_only_rank_0_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a worker other than rank 0 searched")

    rule = tuning(trials=2, steps=1)
    zero, one = (
        bucket_size_trial(rule, START, 0, range(2)),
        bucket_size_trial(rule, START, 1, range(2)),
    )
    while not zero.done:
        rows = [zero.report(0.1), one.report(0.1)]
        zero.process_rows(rows)
        with monkeypatch.context() as patch:
            patch.setattr(bucket_size, "suggest", refuse)
            patch.setattr(bucket_size, "choose", refuse)
            one.process_rows(rows)
    assert one.done


def heard_by(
    rank: int, decided: int = 0
) -> tuple[LedTrial[Any, BucketSizeResult], list[list[float]]]:
    """A tuner of two workers, after ``decided`` decisions, and rows that it would accept."""
    rule = tuning(trials=2, steps=1)
    tuners = [bucket_size_trial(rule, START, r, range(2)) for r in range(2)]
    for _ in range((WARMUP + 2) * decided):
        rows = [tuner.report(0.1) for tuner in tuners]
        for tuner in tuners:
            tuner.process_rows(rows)
    return tuners[rank], [tuner.report(0.1) for tuner in tuners]


BAD_ROWS = {
    "too short": (0, [0.1, 0, 0, 0, START]),
    "too long": (0, [0.1, 0, 0, 0, START, 0, 0]),
    "no such topology": (0, [0.1, 0, 1, 0, MB, 1]),
    "a topology below zero": (0, [0.1, 0, 1, 0, MB, -1]),
    "half a topology": (0, [0.1, 0, 1, 0, MB, 0.5]),
    "not a number": (0, [0.1, 0, math.nan, 0, START, 0]),
    "size is infinite": (0, [0.1, 0, 1, 0, math.inf, 0]),
    "size below the range": (0, [0.1, 0, 1, 0, MB - 1, 0]),
    "size above the range": (0, [0.1, 0, 1, 0, 100 * MB + 1, 0]),
    "size is negative": (0, [0.1, 0, 1, 0, -START, 0]),
    "half a byte": (0, [0.1, 0, 1, 0, MB + 0.5, 0]),
    "a decision left out": (0, [0.1, 0, 2, 1, MB, 0]),
    "a decision from before": (0, [0.1, 0, -1, 0, MB, 0]),
    "half a decision": (0, [0.1, 0, 0.5, 0, MB, 0]),
    "another size without a decision": (0, [0.1, 0, 0, 0, MB, 0]),
    "an early end": (0, [0.1, 0, 1, 1, MB, 0]),
    "an end without a decision": (0, [0.1, 0, 0, 1, START, 0]),
    "a flag that is none": (0, [0.1, 0, 1, 0.5, MB, 0]),
    "negative time": (0, [-0.1, 0, 0, 0, START, 0]),
    "another worker's time is infinite": (1, [math.inf, 0, 0, 0, 0, 0]),
    "another worker's time is negative": (1, [-1, 0, 0, 0, 0, 0]),
    "another worker's time is beyond all measure": (1, [1e300, 0, 0, 0, 0, 0]),
    "another worker is ahead": (1, [0.1, 1, 0, 0, 0, 0]),
    "another worker is behind zero": (1, [0.1, -1, 0, 0, 0, 0]),
    "another worker is between two": (1, [0.1, 0.5, 0, 0, 0, 0]),
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("case", BAD_ROWS)
def test_bucket_trial_malformed_row_is_refused_by_all_and_names_sender(case, rank) -> None:
    tuner, rows = heard_by(rank)
    sender, bad = BAD_ROWS[case]
    rows[sender] = [float(value) for value in bad]
    with pytest.raises(PeerError) as caught:
        tuner.process_rows(rows)
    message = str(caught.value)
    assert message.startswith(
        f"rank {rank}: rank {sender} sent a malformed row for the bucket tuning ["
    )
    assert "\n" not in message


def test_bucket_trial_valid_rows_are_accepted() -> None:
    tuner, rows = heard_by(1)
    assert tuner.process_rows(rows) is None
    assert tuner.process_rows([[0.1, 0, 1, 0, MB, 0], [0.1, 0, 0, 0, 0, 0]]) == (MB, "")


def test_bucket_trial_missing_row_is_refused() -> None:
    tuner, rows = heard_by(1)
    with pytest.raises(PeerError, match="1 of 2 rows"):
        tuner.process_rows(rows[:1])


def test_bucket_trial_after_end_no_decision_is_accepted() -> None:
    tuner, rows = heard_by(1, decided=2)
    assert tuner.done
    assert tuner.process_rows(rows) is None
    for ends in (0.0, 1.0):
        rows[0][2:] = [3.0, ends, float(MB), 0.0]
        with pytest.raises(PeerError, match="decision 2 or the next one"):
            tuner.process_rows(rows)
    assert tuner.done


@given(st.lists(st.floats(), min_size=6, max_size=6), st.integers(0, 1))
def test_bucket_trial_any_row_is_processed_or_refused(row, sender) -> None:
    tuner, rows = heard_by(1)
    rows[sender] = row
    try:
        setting = tuner.process_rows(rows)
    except PeerError:
        return
    assert setting is None or MB <= setting[0] <= 100 * MB


def test_bucket_trial_rows_are_floats_and_only_rank_0_decides() -> None:
    _, rows = heard_by(0)
    assert rows == [[0.1, 0.0, 0.0, 0.0, float(START), 0.0], [0.1] + [0.0] * 5]
    assert {type(value) for row in rows for value in row} == {float}


def test_bucket_trial_rank_0_logs_progress(caplog: pytest.LogCaptureFixture) -> None:
    workers = [Worker(tuning(trials=3, steps=1), rank, 2) for rank in range(2)]
    with caplog.at_level(logging.INFO, logger="wingbeat"):
        in_step(workers, lambda count, size: 0.1 * size / START)
    assert {record.name for record in caplog.records} == {"wingbeat"}
    first, second, third, last = [record.getMessage() for record in caplog.records]
    assert first == "bucket tuning, trial 1 of 3: 25 MB, 10 iterations/s; next 1 MB"
    assert second == (
        "bucket tuning, trial 2 of 3: 1 MB, 250 iterations/s (25.00x the start); next 100 MB"
    )
    assert third == "bucket tuning, trial 3 of 3: 100 MB, 2.5 iterations/s (0.25x the start)"
    result = workers[0].tuner.result
    assert result is not None
    assert last == result.explain()
