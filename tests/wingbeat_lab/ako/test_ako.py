"""Training in which every worker has weights of its own: what people do with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import wingbeat
import wingbeat_lab
from helpers.sums import (
    NOTHING,
    SIZE,
    TINY_MB,
    Sums,
    assert_same,
    drain,
    given,
    made,
    step,
    trained_on,
    weights,
)
from helpers.training import engine, on
from wingbeat import Strategy, parts
from wingbeat.errors import UsageError
from wingbeat.transport import loopback
from wingbeat_lab.ako import Partial

OPTIONS: dict[str, Any] = {
    "usual": wingbeat_lab.Ako(mb=TINY_MB, first_mb=TINY_MB),
    "one bucket": wingbeat_lab.Ako(),
    "all at once": wingbeat_lab.Ako(partitions=1),
    "three": wingbeat_lab.Ako(partitions=3, topology="ring"),
    "more than elements": wingbeat_lab.Ako(partitions=30, mb=TINY_MB, topology="doubling"),
    "bf16": wingbeat_lab.Ako(compression="bf16"),
    "tuned": Strategy(
        plan=parts.TunedBuckets(
            search="grid", mb=TINY_MB, min_mb=TINY_MB / 2, max_mb=8 * TINY_MB, trials=3, steps=1
        ),
        exchange=Partial(),
    ),
    "layers": Strategy(plan="layers@2", exchange=Partial(partitions=2)),
}


@pytest.mark.parametrize("strategy", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("interfaces", [1, 2])
def test_ako_drained_has_the_sum_of_all_gradients(strategy: Any, interfaces: int) -> None:
    steps = 8

    def body(world: Any) -> Any:
        model, optimizer = made(world, strategy)
        for number in range(steps):
            step(model, optimizer, given(number, world.rank))
        before = weights(model)
        drain(model, optimizer, 31)
        after = weights(model)
        wingbeat.release(model, optimizer)
        assert type(model) is Sums
        return before, after

    worlds = loopback.worlds(SIZE, interfaces=interfaces)
    try:
        found = loopback.run(worlds, body)
    finally:
        for world in worlds:
            world.close()
    wanted = trained_on([given(n, rank) for n in range(steps) for rank in range(SIZE)])
    for _, after in found:
        assert_same(after, wanted)
    apart = [before for before, _ in found if not torch.equal(before["a"], found[0][0]["a"])]
    assert bool(apart) == (strategy.exchange.partitions != 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_ako_in_other_dtypes_applies_all_gradients_once(dtype: torch.dtype) -> None:
    def body(world: Any) -> dict[str, Tensor]:
        model, optimizer = made(world, dtype=dtype)
        for number in range(3):
            step(model, optimizer, given(number, world.rank))
        drain(model, optimizer)
        return weights(model)

    for found in on(SIZE, body):
        assert_same(found, trained_on([given(n, r) for n in range(3) for r in range(SIZE)]))


USED = [["abcd", "ab", "ab", "a"], ["abd", "ab", "a", "ac"], ["a", "a", "a", "a"]]
"""By iteration and rank."""


def test_ako_parameters_unused_on_some_ranks_get_the_others_gradients() -> None:
    def body(world: Any) -> Any:
        model, optimizer = made(world)
        grads = []
        for number, used in enumerate(USED):
            step(model, optimizer, given(number, world.rank, used[world.rank]))
            grads.append({n for n, p in model.named_parameters() if p.grad is not None})
        for _ in range(SIZE):
            step(model, optimizer, {"a": NOTHING["a"]})
            grads.append({n for n, p in model.named_parameters() if p.grad is not None})
        return weights(model), grads

    each = [given(n, r, used[r]) for n, used in enumerate(USED) for r in range(SIZE)]
    for found, grads in on(SIZE, body):
        assert_same(found, trained_on(each))
        assert grads[0] == set("abcd"), "somebody has used each"
        assert grads[-1] == {"a"}, "nothing comes any more"


def test_ako_gradients_accumulated_under_no_sync_are_applied_once() -> None:
    def body(world: Any) -> dict[str, Tensor]:
        model, optimizer = made(world)
        for number in range(3):
            optimizer.zero_grad()
            with model.no_sync():
                model(given(2 * number, world.rank)).backward()
            model(given(2 * number + 1, world.rank)).backward()
            optimizer.step()
        drain(model, optimizer)
        return weights(model)

    for found in on(SIZE, body):
        assert_same(found, trained_on([given(n, r) for n in range(6) for r in range(SIZE)]))


def test_ako_backward_onto_exchanged_gradients_is_refused_until_zero_grad() -> None:
    def body(world: Any) -> dict[str, Tensor]:
        model, optimizer = made(world)
        step(model, optimizer, given(0, world.rank))
        for _ in range(2):
            with pytest.raises(UsageError, match="a gradient on top of one that was exchanged"):
                model(given(1, world.rank)).backward()
        with model.no_sync():
            model(given(1, world.rank)).backward()
        with pytest.raises(UsageError, match=r"call optimizer\.zero_grad.* under no_sync"):
            model(given(1, world.rank)).backward()
        for number, way in enumerate((True, False, True), 1):
            optimizer.zero_grad(set_to_none=way)
            model(given(number, world.rank)).backward()
            optimizer.step()
        for param in model.parameters():
            param.grad = None
        model(given(4, world.rank)).backward()
        optimizer.step()
        drain(model, optimizer)
        return weights(model)

    for found in on(SIZE, body):
        assert_same(found, trained_on([given(n, r) for n in range(5) for r in range(SIZE)]))


def test_ako_parameters_outside_the_optimizer_need_model_zero_grad() -> None:
    """Another optimizer may add up the gradients of some steps."""

    def body(world: Any) -> dict[str, Tensor]:
        model = Sums()
        optimizer = torch.optim.SGD([model.a, model.b], lr=0.5)
        model, optimizer = wingbeat.distribute(model, optimizer, wingbeat_lab.Ako(), world=world)
        step(model, optimizer, given(0, world.rank))
        optimizer.zero_grad()
        with pytest.raises(UsageError, match=r"parameter 'c' .* call model\.zero_grad"):
            model(given(1, world.rank)).backward()
        for number in (1, 2):
            model.zero_grad()
            model(given(number, world.rank)).backward()
            optimizer.step()
        for _ in range(SIZE):
            model.zero_grad()
            model(NOTHING).backward()
            optimizer.step()
        return weights(model)

    for found in on(SIZE, body):
        wanted = trained_on([given(n, r, "ab") for n in range(3) for r in range(SIZE)])
        assert_same(found, wanted)


def test_ako_clipping_uses_each_workers_own_norm() -> None:
    def body(world: Any) -> tuple[float, float]:
        model, optimizer = made(world)
        model(given(0, world.rank)).backward()
        norm = float(optimizer.clip_grad_norm_(1.0))
        left = torch.cat([p.grad.reshape(-1) for p in model.parameters()]).norm()
        return norm, float(left)

    found = on(SIZE, body)
    assert len({norm for norm, _ in found}) == SIZE
    assert all(abs(left - 1.0) < 1e-4 for _, left in found)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_ako_scaler_skips_the_same_steps_on_all_workers(bad: float) -> None:
    def body(world: Any) -> Any:
        model, optimizer = made(world)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=100)
        scales = []
        for number in range(8):
            optimizer.zero_grad()
            numbers = given(number, world.rank)
            if (number, world.rank) in ((2, 1), (5, 3)):
                numbers["b"][3] = bad
            scaler.scale(model(numbers)).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return weights(model), scales, optimizer.residual_state_dict()["residuals"]

    for found, scales, kept in on(SIZE, body):
        assert scales == [64.0] * 2 + [32.0] * 3 + [16.0] * 3
        assert all(bool(w.isfinite().all()) for w in found.values())
        assert all(bool(k.isfinite().all()) for k in kept.values())


def test_ako_nan_on_one_worker_is_nan_on_all() -> None:
    def body(world: Any) -> dict[str, Tensor]:
        model, optimizer = made(world)
        numbers = given(0, world.rank)
        if world.rank == 1:
            numbers["a"][0, 0] = float("nan")
        step(model, optimizer, numbers)
        return weights(model)

    for found in on(SIZE, body):
        assert bool(found["a"].isnan().all())
        assert all(bool(found[name].isfinite().all()) for name in "bcd")


BATCHES = (2, 5, 3, 5)


@pytest.mark.parametrize("batches", [BATCHES, (5, 2, 2, 1), (3, 3, 3, 3)])
def test_ako_join_with_uneven_batches_applies_all_gradients_once(batches: Sequence[int]) -> None:
    def body(world: Any) -> Any:
        model, optimizer = made(world)
        with model.join():
            for number in range(batches[world.rank]):
                step(model, optimizer, given(number, world.rank))
        joined = weights(model)
        drain(model, optimizer)
        return joined, weights(model)

    found = on(SIZE, body)
    each = [given(n, rank) for rank, count in enumerate(batches) for n in range(count)]
    for joined, after in found:
        assert_same(after, trained_on(each))
        if len(set(batches)) > 1:
            assert_same(joined, found[0][0])


def test_ako_gradients_of_a_joined_worker_are_not_sent_again() -> None:
    """It has left with what it had exchanged in ``p.grad``, which the others must not get again."""

    def body(world: Any) -> dict[str, Tensor]:
        model, optimizer = made(world)
        with model.join():
            for number in range(1 + world.rank):
                model(given(number, world.rank)).backward()
                optimizer.step()
                if world.rank:
                    optimizer.zero_grad()
        optimizer.zero_grad()
        drain(model, optimizer)
        return weights(model)

    each = [given(n, rank) for rank in range(SIZE) for n in range(1 + rank)]
    for found in on(SIZE, body):
        assert_same(found, trained_on(each))


def test_ako_failed_backward_leaves_finite_weights() -> None:
    def body(world: Any) -> dict[str, Tensor]:
        model, optimizer = made(world)
        step(model, optimizer, given(0, world.rank))
        optimizer.zero_grad()
        handle = model.b.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(given(1, world.rank)).backward()
        handle.remove()
        for number in range(2, 4):
            step(model, optimizer, given(number, world.rank))
        drain(model, optimizer)
        return weights(model)

    assert all(bool(w.isfinite().all()) for found in on(SIZE, body) for w in found.values())


def test_ako_with_lbfgs_is_refused() -> None:
    def body(world: Any) -> None:
        model = Sums()
        optimizer = torch.optim.LBFGS(model.parameters())
        with pytest.raises(UsageError, match=r"LBFGS with gradients that are exchanged in parts"):
            wingbeat.distribute(model, optimizer, wingbeat_lab.Ako(), world=world)

    on(2, body)


def test_ako_different_numbers_of_steps_are_refused() -> None:
    def body(world: Any) -> None:
        model, optimizer = made(world)
        step(model, optimizer, given(0, world.rank))
        optimizer.zero_grad()
        model(given(1, world.rank)).backward()
        if world.rank:
            optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(UsageError, match="different numbers of optimizer steps"):
            model(given(2, world.rank)).backward()
        assert engine(model).compression.residuals is not None

    on(2, body)
