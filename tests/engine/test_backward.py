"""Backwards that end early, come twice, or are not to be synchronised."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import wingbeat
from helpers.training import (
    TINY_MB,
    assert_same,
    backward,
    batch,
    engine,
    net,
    on,
    sgd,
    train,
    weights,
)
from wingbeat.errors import UsageError

STRATEGIES = [
    wingbeat.AllReduce(mb=TINY_MB),
    wingbeat.DeAR(plan="fixed", mb=TINY_MB),
    wingbeat.DeAR(plan="fixed", mb=TINY_MB, shard_optimizer=True),
]
KINDS = ["allreduce", "dear", "sharded"]

strategies = pytest.mark.parametrize("strategy", STRATEGIES, ids=KINDS)


class Lost(Exception):
    pass


def _distributed(world: Any, strategy: Any) -> tuple[Any, Any]:
    model = net()
    return wingbeat.distribute(model, sgd(model.parameters()), strategy, world=world)


def _raise(_grad: Any) -> None:
    raise Lost


def _cut_short(model: Any, rank: int) -> None:
    """A backward that has passed some layers, and launched their buckets, when it fails."""
    hidden = torch.tanh(model.first(batch(50, rank)))
    hidden.register_hook(_raise)
    out = model.head(torch.tanh(model.second(hidden)) * model.scale)
    with pytest.raises(Lost):
        out.square().mean().backward()


def _gradients(model: Any) -> dict[str, Any]:
    return {
        name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }


@strategies
def test_a_backward_after_one_cut_short_starts_from_nothing(strategy: Any) -> None:
    """Without ``zero_grad`` in between: what the first had put into the buckets does not count."""

    def body(world: Any, fail: bool) -> Any:
        model, _ = _distributed(world, strategy)
        if fail:
            model(batch(49, world.rank))
            _cut_short(model, world.rank)
        backward(model, world.rank, 0)
        return _gradients(model)

    got = on(2, lambda world: body(world, True))
    assert_same(got, on(2, lambda world: body(world, False)))


@strategies
def test_a_backward_cut_short_whose_graph_still_exists_is_recovered(strategy: Any) -> None:
    """A thread of autograd for a device keeps the graph a little longer than the exception."""
    together = threading.Barrier(2)  # the ranks are threads, of which none may be in backward

    def body(world: Any, fail: bool) -> Any:
        model, optimizer = _distributed(world, strategy)
        train(model, optimizer, [0])
        if fail:
            model(batch(49, world.rank))
            _cut_short(model, world.rank)
            engine(model)._backward = lambda: engine  # the graph's callback exists
            together.wait(20)
            optimizer.zero_grad()
            together.wait(20)
        train(model, optimizer, [1, 2])
        return weights(model)

    got = on(2, lambda world: body(world, True))
    assert_same(got, on(2, lambda world: body(world, False)))


def test_a_backward_cut_short_is_recovered_while_another_thread_is_in_backward() -> None:
    inside, ends = threading.Event(), threading.Event()

    def hold(_grad: torch.Tensor) -> None:
        inside.set()
        assert ends.wait(60)

    def backward_of_another_model() -> None:
        leaf = torch.ones(1, requires_grad=True)
        leaf.register_hook(hold)
        leaf.sum().backward()

    def body(world: Any) -> None:
        model, optimizer = _distributed(world, STRATEGIES[0])
        model(batch(49, world.rank))
        _cut_short(model, world.rank)
        engine(model)._backward = lambda: engine  # the graph's callback exists
        together.wait(20)  # the ranks are threads, and their backward has ended
        assert engine(model).backward_aborted
        together.wait(20)
        optimizer.zero_grad()
        train(model, optimizer, [1])

    together = threading.Barrier(2)
    other = threading.Thread(target=backward_of_another_model)
    other.start()
    try:
        assert inside.wait(20)
        on(2, body)
    finally:
        ends.set()
        other.join()


@strategies
def test_clipping_by_function_and_by_method_is_the_same(strategy: Any) -> None:
    def body(world: Any) -> list[float]:
        _, optimizer = made = _distributed(world, strategy)
        norms = []
        for clip in (
            optimizer.clip_grad_norm_,
            lambda *own: wingbeat.clip_grad_norm_(made[1], *own),
        ):
            backward(made[0], world.rank, 0)
            norms.append(float(clip(1e-3, 1.0)))
            optimizer.zero_grad()
        return norms

    (method, function), second = on(2, body)
    assert method == function > 0
    assert second == [method, function]


def test_clipping_without_distribute_is_refused() -> None:
    with pytest.raises(UsageError, match=r"clip_grad_norm_\(SGD\): pass an optimizer that dist"):
        wingbeat.clip_grad_norm_(sgd(net().parameters()), 1.0)


@strategies
@pytest.mark.parametrize("how", ["zero_grad", "cut short"])
def test_gradients_that_were_dropped_have_no_norm(strategy: Any, how: str) -> None:
    """Also once DeAR knows that gradients are clipped before they are gathered."""

    def body(world: Any) -> list[float]:
        model, optimizer = _distributed(world, strategy)
        norms = []
        for step in range(2):
            backward(model, world.rank, step)
            norms.append(optimizer.clip_grad_norm_(1.0))
            optimizer.zero_grad()
        if how == "zero_grad":
            backward(model, world.rank, 2)
            optimizer.zero_grad()
        else:
            model(batch(49, world.rank))
            _cut_short(model, world.rank)
        norms.append(optimizer.clip_grad_norm_(1.0))
        backward(model, world.rank, 3)
        norms.append(optimizer.clip_grad_norm_(1.0))
        return [float(norm) for norm in norms]

    first, second = on(2, body)
    assert first == second
    assert [norm > 0 for norm in first] == [True, True, False, True]


@strategies
def test_a_backward_cut_short_drops_accumulated_gradients(strategy: Any) -> None:
    """Also what a step has used up: nobody has to call ``zero_grad`` for it any more."""

    def body(world: Any, fail: bool) -> Any:
        model, optimizer = _distributed(world, strategy)
        train(model, optimizer, [0])
        if fail:
            model(batch(49, world.rank))
            _cut_short(model, world.rank)
        else:
            optimizer.zero_grad()
        backward(model, world.rank, 1)
        optimizer.step()
        return weights(model)

    got = on(2, lambda world: body(world, True))
    assert_same(got, on(2, lambda world: body(world, False)))


@pytest.mark.parametrize(
    "strategy", [wingbeat.AllReduce(), wingbeat.DeAR(plan="fixed")], ids=KINDS[:2]
)
def test_a_backward_cut_short_within_a_bucket_drops_its_gradients(strategy: Any) -> None:
    """When the order is known, so that gradients are only listed until their bucket is complete."""

    def body(world: Any, fail: bool) -> Any:
        model, optimizer = _distributed(world, strategy)
        train(model, optimizer, range(3))
        if fail:
            model(batch(49, world.rank))
            _cut_short(model, world.rank)
            assert not engine(model).hooks.arrivals.listing
        train(model, optimizer, range(4, 6))
        return weights(model)

    got = on(2, lambda world: body(world, True))
    assert_same(got, on(2, lambda world: body(world, False)))


@strategies
def test_parameters_unused_after_a_backward_cut_short_have_no_gradient(strategy: Any) -> None:
    def body(world: Any) -> None:
        model, _ = _distributed(world, strategy)
        model(batch(49, world.rank))
        _cut_short(model, world.rank)
        model(batch(51, world.rank))
        model.first(batch(51, world.rank)).sum().backward()
        gradients = _gradients(model)
        assert gradients["first.weight"] is not None
        assert gradients["head.weight"] is None

    on(2, body)


@strategies
def test_no_sync_inside_no_sync_does_not_end_the_outer_one(strategy: Any) -> None:
    """Leaving the inner context does not end the outer one."""

    def body(world: Any) -> Any:
        model, optimizer = _distributed(world, strategy)
        with model.no_sync():
            with model.no_sync():
                backward(model, world.rank, 0)
            backward(model, world.rank, 1)
            local = model.head.weight.grad.clone()
        backward(model, world.rank, 2)
        optimizer.step()
        return local, weights(model)

    def reference(world: Any) -> Any:
        model, optimizer = _distributed(world, strategy)
        with model.no_sync():
            backward(model, world.rank, 0)
            backward(model, world.rank, 1)
        backward(model, world.rank, 2)
        optimizer.step()
        return weights(model)

    (one, first), (other, second) = on(2, body)
    assert not torch.equal(one, other), "gradients of two ranks were exchanged"
    assert_same(first, second)
    assert_same(first, on(2, reference)[0])


@strategies
def test_a_backward_after_an_unsynchronised_one_is_synchronised(strategy: Any) -> None:
    """What a forward under ``no_sync`` has decided ends with its backward."""

    def body(world: Any) -> Any:
        model, optimizer = _distributed(world, strategy)
        for _ in range(2):
            with model.no_sync():
                loss = model(batch(0, world.rank)).square().mean()
                loss.backward(retain_graph=True)
            loss.backward()  # synchronised, as no forward has decided otherwise
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    first, second = on(2, body)
    assert_same(first, second)


@pytest.mark.parametrize("strategy", STRATEGIES[:2], ids=KINDS[:2])
def test_two_models_in_one_backward_wait_when_both_have_launched_everything(strategy: Any) -> None:
    """Both have parts that are unused, and which is at its end first differs from rank to rank."""

    def body(world: Any) -> Any:
        pairs = [_distributed(world, strategy) for _ in range(2)]
        for step in range(2):
            losses = [
                pairs[i][0](batch(step + 10 * i, world.rank)).square().mean()
                for i in ((0, 1), (1, 0))[world.rank]
            ]
            torch.stack(losses).sum().backward()
            for _, optimizer in pairs:
                optimizer.step()
                optimizer.zero_grad()
        return [weights(model) for model, _ in pairs]

    first, second = on(2, body, timeout=5.0)
    assert_same(first, second)


@strategies
def test_a_forward_recomputed_in_backward_decides_nothing(strategy: Any) -> None:
    """As checkpointing does with a whole model, here after ``no_sync`` has been left."""

    def body(world: Any) -> Any:
        model, optimizer = _distributed(world, strategy)
        for step in range(2):
            optimizer.zero_grad()
            x = batch(step, world.rank).requires_grad_()
            with model.no_sync():
                loss = checkpoint(model, x, use_reentrant=False).square().mean()
            loss.backward()
            alone = net()
            alone.load_state_dict(model.state_dict())
            backward(alone, world.rank, step)
            torch.testing.assert_close(model.head.weight.grad, alone.head.weight.grad)
            backward(model, world.rank, 50 + step)
            optimizer.step()
        return weights(model)

    first, second = on(2, body)
    assert_same(first, second)


@strategies
def test_zeroing_makes_no_gradient_where_there_was_none(strategy: Any) -> None:
    def body(world: Any) -> None:
        model, optimizer = _distributed(world, strategy)
        train(model, optimizer, [0])
        optimizer.zero_grad(set_to_none=True)
        backward(model, world.rank, 1)
        optimizer.zero_grad(set_to_none=False)
        gradients = _gradients(model)
        assert not gradients["head.weight"].any()
        assert gradients["spare.weight"] is None

    on(2, body)
