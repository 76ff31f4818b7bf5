"""Workers that have made different numbers of steps all say how many each has made."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import wingbeat
import wingbeat_lab
from helpers.training import TINY_MB, backward, engine, net, on, sgd, train
from wingbeat.compression import Half, Sketch, TopK
from wingbeat.engine.gradients.bucket import COUNT_MODULUS, Bucket, Slot, StepCounter
from wingbeat.errors import PeerError, UsageError


def _said(rank: int, count: int, counts: Sequence[float]) -> str:
    steps = StepCounter(rank)
    assert steps.count == 0
    steps.count = count
    with pytest.raises(UsageError) as caught:
        steps.check(counts)
    assert steps.diverged
    assert "\n" not in str(caught.value)
    return str(caught.value).partition("(")[2].partition(")")[0]


def test_a_mismatch_is_the_same_error_on_every_worker() -> None:
    counts = [8.0, 9.0, 10.0]
    for rank, count in enumerate((7, 8, 9)):
        for since in (0, 1):  # a step that is called before anybody looks
            assert _said(rank, count + since, counts) == "rank 0 7, rank 1 8, rank 2 9"


def test_workers_of_a_column_are_named_by_their_ranks_in_the_job() -> None:
    steps = StepCounter(1, (1, 3, 5))
    steps.count = 4
    with pytest.raises(UsageError, match=r"\(rank 1 5, rank 3 4, rank 5 5\)"):
        steps.check([6.0, 5.0, 6.0])


def test_counts_above_the_modulus_are_reported_in_full() -> None:
    counts = [1.0, COUNT_MODULUS]
    assert (
        _said(0, 5 * COUNT_MODULUS, counts)
        == f"rank 0 {5 * COUNT_MODULUS}, rank 1 {5 * COUNT_MODULUS - 1}"
    )
    assert (
        _said(1, 5 * COUNT_MODULUS, counts)
        == f"rank 0 {5 * COUNT_MODULUS}, rank 1 {5 * COUNT_MODULUS - 1}"
    )


def test_step_counts_of_many_ranks_are_reported_in_one_line() -> None:
    counts = [5.0] * 64
    counts[3] = 4.0
    assert _said(7, 4, counts) == "ranks 0-2 4, rank 3 3, ranks 4-63 4"


def test_a_worker_without_batches_is_not_compared_and_raises_the_same() -> None:
    counts = [5.0, 0.0, 5.0, 4.0]
    assert _said(0, 4, counts) == _said(1, 4, counts) == "rank 0 4, rank 2 4, rank 3 3"


@pytest.mark.parametrize("count", [math.nan, math.inf, -1.0, 2.5, COUNT_MODULUS + 1.0])
def test_an_invalid_count_names_its_sender(count: float) -> None:
    with pytest.raises(PeerError, match=rf"rank 0: rank 1 sent {count}"):
        StepCounter(0).check([1.0, count])


def _bucket() -> Bucket:
    return Bucket(0, [Slot(0, "weight", torch.nn.Parameter(torch.zeros(3)))], workers=2)


@pytest.mark.parametrize("steps", [0, 1, COUNT_MODULUS - 1, COUNT_MODULUS, 3 * COUNT_MODULUS + 5])
@pytest.mark.parametrize("ahead", [0, 1, None])
def test_one_more_step_changes_the_count_in_a_bucket(steps: int, ahead: int | None) -> None:
    """None: a worker without batches, whose steps do not count."""
    mine, other = _bucket(), _bucket()
    mine.write_tail(steps, 0)
    other.write_tail(None if ahead is None else steps + ahead, 1)
    mine.flat += other.flat
    found = StepCounter(0)
    found.count = steps
    with pytest.raises(UsageError) if ahead == 1 else contextlib.nullcontext():
        found.check(mine.counts.tolist())


SKIPPING: dict[str, Any] = {
    "allreduce": wingbeat.AllReduce(mb=TINY_MB),
    "bf16": wingbeat.AllReduce(mb=TINY_MB, compression="bf16"),
    "half": wingbeat.AllReduce(mb=TINY_MB, compression=Half()),
    "sketch": wingbeat.AllReduce(mb=TINY_MB, compression=Sketch(auto_disable=False)),
    "dear": wingbeat.DeAR(plan="fixed", mb=TINY_MB),
    "topk": wingbeat.DeAR(plan="fixed", mb=TINY_MB, compression=TopK(auto_disable=False)),
    "ako": wingbeat_lab.Ako(),
    "bytescheduler": wingbeat_lab.ByteScheduler(),
    "geryon": wingbeat.Geryon(mb=TINY_MB, servers=1, encrypted=False),
    "geryon-start": wingbeat.Geryon(mb=TINY_MB, servers=1, pull="start", encrypted=False),
}

TOGETHER: dict[str, Any] = {
    "sharded": wingbeat.DeAR(plan="fixed", mb=TINY_MB, shard_optimizer=True),
    "server": wingbeat.Geryon(mb=TINY_MB, servers=1, update="server", encrypted=False),
}
"""With these no worker has the whole optimizer: a step is all workers' or none's."""


def _skipping(strategy: Any, skipped: range) -> list[str]:
    """Train on three workers, of which one skips some steps; return what each says."""

    def body(world: Any) -> str:
        model = net()
        model, optimizer = wingbeat.distribute(
            model, sgd(model.parameters()), strategy, world=world
        )
        with pytest.raises(UsageError) as caught:
            _train(model, optimizer, skipped if world.rank == 1 else range(0))
        return str(caught.value)

    return on(3, body)


def _train(model: Any, optimizer: Any, skipped: range) -> None:
    for number in range(6):
        optimizer.zero_grad()
        backward(model, engine(model).world.rank, number)
        if number not in skipped:
            optimizer.step()


@pytest.mark.parametrize("skipped", [range(2, 3), range(2, 6)], ids=["one", "all"])
@pytest.mark.parametrize("name", SKIPPING)
def test_a_batch_skipped_on_one_rank_is_one_message_on_all(name: str, skipped: range) -> None:
    """Also where that rank goes on to skip, so that it never uses the gradients that show it."""
    said = _skipping(SKIPPING[name], skipped)
    assert len(set(said)) == 1
    assert "optimizer steps (rank 0 3, rank 1 2, rank 2 3), so" in said[0]


@pytest.mark.parametrize("name", TOGETHER)
def test_a_batch_skipped_with_a_divided_optimizer_is_one_message_on_all(name: str) -> None:
    said = _skipping(TOGETHER[name], range(2, 3))
    assert len(set(said)) == 1
    assert "rank 0 calls optimizer.step() while rank 1 drops its gradients" in said[0]


@pytest.mark.parametrize("name", ["allreduce", "dear", "sharded"])
def test_a_read_of_gradients_reports_a_skipped_step(name: str) -> None:
    """Not only by the next step, which may come after decisions by wrong gradients."""
    strategy = (SKIPPING | TOGETHER)[name]

    def body(world: Any) -> None:
        model = net()
        model, optimizer = wingbeat.distribute(
            model, sgd(model.parameters()), strategy, world=world
        )
        train(model, optimizer, range(2))
        engine(model).steps_made.count += world.rank  # the shards' rounds would notice earlier
        optimizer.zero_grad()
        with pytest.raises(UsageError, match=r"rank 0 2, rank 1 3\b"):
            _read(model, world.rank)

    on(2, body)


def _read(model: Any, rank: int) -> None:
    backward(model, rank, 2)
    model.head._parameters["weight"].grad.norm()
