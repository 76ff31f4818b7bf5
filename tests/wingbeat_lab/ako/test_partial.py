"""Partial gradient exchange: everything arrives once, within as many iterations as partitions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.amounts import examples
from helpers.partial import SHAPES, Worker, crew, iterate
from wingbeat.engine.gradients.bucket import Bucket, Slot
from wingbeat.errors import UsageError
from wingbeat.planning.controllers import Prioritized
from wingbeat.schedules.events import Operation
from wingbeat_lab.ako.partial import MixedGradients, turn_of

NAMES = [f"p{i}" for i in range(len(SHAPES))]
PLANS = ([[0, 1, 2, 3]], [[3, 2], [1, 0]], [[0], [1], [2], [3]], [[2, 0, 3], [1]])


def whole(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Whole numbers, of which sums are exact in any order; none is 0."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(1, 100, shape, generator=generator).float()
    return found * (1 - 2 * torch.randint(0, 2, shape, generator=generator))


def gradients(seed: int, used: Sequence[bool] = (True,) * 4) -> dict[str, torch.Tensor]:
    each = zip(NAMES, SHAPES, used, strict=True)
    return {name: whole(shape, 7 * seed + i) for i, (name, shape, use) in enumerate(each) if use}


class Account:
    """All gradients that were made, by parameter."""

    def __init__(self) -> None:
        self.made = {
            n: torch.zeros(s, dtype=torch.float64) for n, s in zip(NAMES, SHAPES, strict=True)
        }

    def add(self, each: Sequence[dict[str, torch.Tensor]]) -> None:
        for found in each:
            for name, gradient in found.items():
                self.made[name] += gradient.double()

    def check(self, workers: Sequence[Worker]) -> None:
        """What a worker has applied, and what the others still keep from it, is all there is."""
        kept = [worker.kept() for worker in workers]
        for worker in workers:
            for name, made in self.made.items():
                due = sum(k[name].double() for r, k in enumerate(kept) if r != worker.world.rank)
                assert torch.equal(worker.applied[name] + due, made), f"{name} of {worker.world}"

    def check_through(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            for name, made in self.made.items():
                assert torch.equal(worker.applied[name], made), f"{name} of {worker.world}"


def test_each_worker_sends_each_partition_once_in_as_many_iterations() -> None:
    for partitions, rank in itertools.product(range(1, 6), range(4)):
        sent = [turn_of(rank, turn, partitions) for turn in range(partitions)]
        assert sorted(sent) == list(range(partitions))
    assert len({turn_of(rank, 5, 4) for rank in range(4)}) == 4, "all of a bucket in an iteration"


history = st.lists(
    st.tuples(
        st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=4, max_size=4),
        st.sampled_from([None, *PLANS]),
    ),
    max_size=8,
)


@given(
    size=st.integers(2, 4),
    partitions=st.integers(0, 7),
    history=history,
    seed=st.integers(0, 1000),
)
@settings(max_examples=examples(150), deadline=None)
def test_every_gradient_is_applied_once_on_every_worker(
    size: int, partitions: int, history: list[Any], seed: int
) -> None:
    """Whatever is used by whom, and whenever buckets are made anew."""
    room, workers = crew(size, partitions)
    account = Account()
    for step, (used, plan) in enumerate(history):
        if plan is not None:
            for worker in workers:
                worker.plan(plan)
        each = [gradients(seed + 10 * step + rank, used[rank]) for rank in range(size)]
        account.add(each)
        iterate(room, workers, each)
        account.check(workers)
    for _ in range(partitions or size):
        iterate(room, workers)
    account.check_through(workers)
    assert all(not shown for shown in iterate(room, workers)), "nothing is left, nothing is shown"


@pytest.mark.parametrize(("size", "partitions"), [(2, 0), (3, 0), (4, 2), (3, 5), (2, 100)])
def test_a_worker_sends_what_the_formula_says(size: int, partitions: int) -> None:
    room, workers = crew(size, partitions)
    for worker in workers:
        worker.plan(PLANS[1])
    iterate(room, workers, [gradients(rank) for rank in range(size)])
    for bucket in workers[0].buckets:
        part = math.ceil(bucket.numel / (partitions or size))
        assert room.elements[bucket.index] == part + len(bucket.slots) + size


def test_own_gradients_are_applied_whole_and_at_once() -> None:
    room, workers = crew(3, 3)
    mine = gradients(1)
    shown = iterate(room, workers, [mine, {}, {}])
    assert all(torch.equal(shown[0][name], mine[name]) for name in NAMES)
    # Rank 0 sends its first third of 24 elements: most of the first parameter.
    for other in shown[1:]:
        there = torch.cat([other[n].reshape(-1) for n in NAMES])
        assert there.count_nonzero() == 8
        assert torch.equal(there[:8], torch.cat([mine[n].reshape(-1) for n in NAMES])[:8])


def test_late_part_of_an_unused_parameter_is_shown_when_it_arrives() -> None:
    room, workers = crew(2, 4)
    iterate(room, workers, [{"p3": whole((2, 3), 1)}, {}])
    seen = [set(shown) for shown in (iterate(room, workers)[1] for _ in range(4))]
    assert seen[2] == {"p3"}, "elements 18 to 23 are p3"
    assert not any(seen[:2] + seen[3:])


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_non_finite_gradient_is_nan_on_all_workers_and_not_kept(bad: float) -> None:
    room, workers = crew(3, 3)
    account = Account()
    first = [gradients(rank) for rank in range(3)]
    iterate(room, workers, first)
    each = [gradients(10 + rank) for rank in range(3)]
    each[1]["p0"][2, 1] = bad
    for shown in iterate(room, workers, each):
        assert bool(shown["p0"].isnan().all())
        assert all(bool(shown[name].isfinite().all()) for name in NAMES[1:])
    account.add([*first, *each])
    for _ in range(4):
        for shown in iterate(room, workers):
            assert all(bool(gradient.isfinite().all()) for gradient in shown.values())
    for worker in workers:
        for name in NAMES[1:]:
            assert torch.equal(worker.applied[name], account.made[name])
    assert all(not kept.any() for worker in workers for kept in worker.kept().values())


def test_infinity_of_another_worker_is_nan_for_a_worker_without_gradient() -> None:
    room, workers = crew(2, 2)
    shown = iterate(room, workers, [{"p1": torch.full((5,), math.inf)}, {}])
    assert bool(shown[1]["p1"].isnan().all())
    assert set(shown[1]) == {"p1"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_narrow_parameters_are_gathered_in_float32_and_lose_nothing(dtype: torch.dtype) -> None:
    """256 + 1 has no place in bfloat16, so that a sum in it would stand still."""
    room, workers = crew(2, 1, dtype=dtype, shapes=((6,),))
    workers[0].unsent.of(workers[0].buckets[0])[:6] = 256.0
    one = torch.ones(6, dtype=dtype)
    for _ in range(3):
        iterate(room, workers, [{"p0": one}, {}])
    for _ in range(2):
        iterate(room, workers)
    assert workers[0].applied["p0"].tolist() == [3.0] * 6
    assert workers[1].applied["p0"].tolist() == [259.0] * 6
    assert room.elements[0] == 6 + 1 + 2


def test_more_than_float16_can_hold_is_sent_in_two_turns() -> None:
    room, workers = crew(2, 1, dtype=torch.float16, shapes=((2,),))
    workers[0].unsent.of(workers[0].buckets[0])[:2] = 70000.0
    for _ in range(3):
        for shown in iterate(room, workers):
            assert all(bool(gradient.isfinite().all()) for gradient in shown.values())
    assert workers[1].applied["p0"].tolist() == [70000.0] * 2


def test_rounding_error_of_bf16_parts_is_sent_later() -> None:
    room, workers = crew(2, 1, wire="bfloat16", shapes=((4,),))
    mine = torch.tensor([1.0, 257.0, 1 / 3, 100.01])
    iterate(room, workers, [{"p0": mine}, {}])
    assert not torch.equal(workers[1].applied["p0"].float(), mine)
    for _ in range(4):
        iterate(room, workers)
    assert torch.equal(workers[1].applied["p0"].float(), mine)
    assert workers[0].kept()["p0"].count_nonzero() == 0


def test_parameters_without_elements_and_fewer_elements_than_partitions() -> None:
    room, workers = crew(3, 7, shapes=((0,), (2,), (0, 3)))
    mine = {"p0": torch.zeros(0), "p1": torch.tensor([5.0, 6.0]), "p2": torch.zeros(0, 3)}
    iterate(room, workers, [mine, mine, {}])
    for _ in range(6):
        iterate(room, workers)
    assert [w.applied["p1"].tolist() for w in workers] == [[10.0, 12.0]] * 3


def test_step_counts_that_differ_arrive_with_the_parts() -> None:
    room, workers = crew(2, 2)
    iterate(room, workers)
    assert workers[0].buckets[0].counts.tolist() == [4, 4]
    for worker, count in zip(workers, (3, 4), strict=True):
        for bucket in worker.buckets:
            bucket.write_tail(count, worker.world.rank)
            worker.exchange.start(Operation.ALL_REDUCE, bucket)
    room.deliver()
    for worker in workers:
        worker.buckets[0].settle()
        assert worker.buckets[0].counts.tolist() == [4, 5]


def test_waiting_twice_for_a_part_adds_it_once() -> None:
    room, workers = crew(2, 1)
    for worker in workers:
        worker.send(gradients(worker.world.rank))
    room.deliver()
    handle = workers[0].buckets[0].handle
    assert handle is not None
    handle.wait_received()
    found = workers[0].buckets[0].flat.clone()
    handle.wait()
    assert torch.equal(workers[0].buckets[0].flat, found)


def test_partial_exchange_has_no_priorities() -> None:
    _, workers = crew(2, 2)
    assert not isinstance(workers[0].exchange, Prioritized)


def shown() -> tuple[MixedGradients, list[Slot]]:
    """ShownGradients after an exchange, of two parameters; the optimizer updates the first one."""
    slots = [Slot(i, f"p{i}", torch.nn.Parameter(torch.ones(3))) for i in range(2)]
    bucketing: Any = SimpleNamespace(slots=slots, buckets=[Bucket(0, slots)])
    slots[0].owned = True
    views = MixedGradients(bucketing)
    views.begin_backward()
    for slot in slots:
        slot.used = True
    views.on_gradients(slots)
    views.show()
    return views, slots


def test_backward_on_exchanged_gradients_is_refused() -> None:
    views, slots = shown()
    for _ in range(2):
        with pytest.raises(UsageError, match=r"'p0' .* before each backward call optimizer\.zero"):
            views.begin_backward()
    slots[0].param.grad = None
    with pytest.raises(UsageError, match=r"'p1' .* before each backward call model\.zero_grad"):
        views.begin_backward()
    slots[1].param.grad = torch.ones(3)  # somebody's own
    views.begin_backward()


def test_backward_on_gradients_zeroed_in_place_is_allowed() -> None:
    views, slots = shown()
    views.on_zero_grad(set_to_none=False)
    with pytest.raises(UsageError, match="'p1'"):
        views.begin_backward()
    slots[1].param.grad = None
    views.begin_backward()
    views.show()
    with pytest.raises(UsageError, match="'p0'"):
        views.begin_backward()
