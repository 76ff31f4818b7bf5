"""What optimizers and hooks may do in a step that DeAR takes apart."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import wingbeat
from helpers.training import (
    assert_same,
    backward,
    batch,
    distributed,
    engine,
    net,
    on,
    sgd,
    train,
    weights,
)


def _clip_shown(optimizer: Any) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    nn.utils.clip_grad_norm_(params, 0.01)


def _clip(optimizer: Any) -> None:
    optimizer.clip_grad_norm_(0.01)


def _shrink(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.data.mul_(0.99)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(("when", "act"), [("pre", _clip_shown), ("pre", _clip), ("post", _shrink)])
def test_step_hooks_see_gradients_before_and_parameters_after(
    when: str, act: Callable[[Any], None], sharded: bool
) -> None:
    def trained(strategy: Any) -> dict[str, torch.Tensor]:
        def body(world: Any) -> Any:
            model = net()
            model, optimizer = wingbeat.distribute(
                model, sgd(model.parameters()), strategy, world=world
            )
            register = getattr(optimizer, f"register_step_{when}_hook")
            register(lambda opt, _args, _kwargs: act(opt))
            train(model, optimizer, range(4))
            return weights(model)

        first, second = on(2, body)
        assert all(torch.equal(first[name], second[name]) for name in first)
        return first

    dear = trained(wingbeat.DeAR(plan="fixed", mb=0.001, shard_optimizer=sharded))
    reference = trained(wingbeat.AllReduce(mb=0.001))
    for name, weight in reference.items():
        torch.testing.assert_close(dear[name], weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clip", [0.01, 100.0])
def test_the_norm_of_float64_gradients_is_float64(clip: float) -> None:
    def body(world: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model = net().double()
        strategy = wingbeat.DeAR(plan="fixed")
        model, optimizer = wingbeat.distribute(
            model, sgd(model.parameters()), strategy, world=world
        )
        model(torch.full((2, 6), 0.1 + world.rank).double()).square().sum().backward()
        norm = optimizer.clip_grad_norm_(clip)
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return norm, grads

    (norm, grads), _ = on(2, body)
    assert norm.dtype is torch.float64
    after = torch.stack([g.norm() for g in grads.values()]).norm()
    assert float(after) == pytest.approx(min(clip, float(norm)), rel=1e-3)


@pytest.mark.parametrize("sharded", [False, True])
def test_the_norm_of_half_precision_gradients_may_be_beyond_it(sharded: bool) -> None:
    """Squares of 40,000 and their sum have no place in float16, whose largest is 65,504."""

    def body(world: Any) -> tuple[torch.Tensor, torch.Tensor]:
        model = nn.Linear(20, 10, bias=False).half()
        with torch.no_grad():
            model.weight.zero_()
        strategy = wingbeat.DeAR(plan="fixed", shard_optimizer=sharded)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = wingbeat.distribute(model, optimizer, strategy, world=world)
        for value in (0.0, 200.0):  # the first tells that gradients are clipped before they travel
            optimizer.zero_grad()
            given = torch.full((1, 10), value).half()
            model(torch.full((1, 20), 200.0).half()).backward(given)
            norm = optimizer.clip_grad_norm_(10.0)
            optimizer.step()
        return norm, model.weight.detach().float()

    wanted = 40_000.0 * 200**0.5
    for norm, weight in on(2, body):
        assert norm.dtype is torch.float32
        assert float(norm) == pytest.approx(wanted, rel=1e-3)
        assert float(weight.norm()) == pytest.approx(10.0, rel=1e-2)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_frozen_parameter_with_a_gradient_set_by_hand_is_updated(sharded: bool) -> None:
    def body(world: Any) -> Any:
        model = net()
        model.spare.weight.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        strategy = wingbeat.DeAR(plan="fixed", mb=0.001, shard_optimizer=sharded)
        model, optimizer = wingbeat.distribute(model, optimizer, strategy, world=world)
        before = model.spare.weight.clone()
        for step in range(2):
            optimizer.zero_grad()
            backward(model, world.rank, step)
            model.spare.weight.grad = torch.ones(7, 7)
            optimizer.step()
        return model.spare.weight - before

    for change in on(2, body):
        torch.testing.assert_close(change, torch.full((7, 7), -1.0))


STRATEGIES = {
    "allreduce": wingbeat.AllReduce(mb=0.001),
    "dear": wingbeat.DeAR(plan="fixed", mb=0.001),
    "sharded": wingbeat.DeAR(plan="fixed", mb=0.001, shard_optimizer=True),
}


def _alike(play: Callable[[Any, Any, int], None], names: Iterable[str] = STRATEGIES) -> None:
    """Demand the same weights on all ranks, whatever the strategy."""
    found: list[dict[str, torch.Tensor]] = []
    for name in names:

        def body(world: Any, strategy: Any = STRATEGIES[name]) -> Any:
            model = net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            model, optimizer = wingbeat.distribute(model, optimizer, strategy, world=world)
            play(model, optimizer, world.rank)
            return weights(model)

        found += on(2, body)
    for other in found[1:]:
        assert_same(other, found[0], 1e-5)


def test_a_backward_may_add_to_some_gradients_and_not_to_others() -> None:
    """Those that come first are new, so that nobody has asked yet for what there was before."""

    def play(model: Any, optimizer: Any, rank: int) -> None:
        for step in range(3):
            optimizer.zero_grad()
            backward(model, rank, step)
            for param in model.head._parameters.values():
                param.grad = None
            backward(model, rank, 50 + step)
            optimizer.step()

    _alike(play)


def test_a_closure_has_gradients_whatever_its_caller_has_turned_off() -> None:
    def play(model: Any, optimizer: Any, rank: int) -> None:
        for step in range(3):

            def closure(step: int = step) -> float:
                optimizer.zero_grad()
                backward(model, rank, step)
                return 0.0

            with torch.no_grad():
                optimizer.step(closure)

    _alike(play)


def test_another_optimizer_has_whole_gradients_also_where_the_own_are_clipped_in_parts() -> None:
    """As soon as backward is over, although another worker is late."""

    def trained(strategy: Any) -> Any:
        def body(world: Any) -> Any:
            model = net()
            others = list(model.second.parameters())
            own = [p for p in model.parameters() if not any(p is other for other in others)]
            second = torch.optim.SGD(others, lr=0.1)
            first: Any = torch.optim.SGD(own, lr=0.1)
            model, first = wingbeat.distribute(model, first, strategy, world=world)
            for step in range(3):
                first.zero_grad()
                second.zero_grad()
                hidden = model.first(batch(step, world.rank))
                if world.rank == 1:
                    hidden.register_hook(lambda _grad: time.sleep(0.02))
                model.head(model.second(hidden) * model.scale).square().mean().backward()
                second.step()
                first.clip_grad_norm_(0.5)
                first.step()
            return weights(model)

        first, second = on(2, body)
        assert_same(first, second)
        return first

    whole = trained(STRATEGIES["allreduce"])
    for name in ("dear", "sharded"):
        assert_same(trained(STRATEGIES[name]), whole, 1e-5)


def test_gradients_that_were_only_clipped_are_not_left_for_the_next_step() -> None:
    """One rank looks at what it has clipped, the other drops it; both go on alike."""

    def body(world: Any) -> Any:
        model = net()
        strategy = wingbeat.DeAR(plan="fixed", mb=0.001)
        model, optimizer = wingbeat.distribute(
            model, sgd(model.parameters()), strategy, world=world
        )
        for step in range(3):
            optimizer.zero_grad()
            backward(model, world.rank, step)
            optimizer.clip_grad_norm_(0.01)
            if step == 1:
                if world.rank == 0:
                    _ = [p.grad for p in model.parameters()]
                optimizer.zero_grad()
            else:
                optimizer.step()
        return weights(model)

    first, second = on(2, body)
    assert all(torch.equal(first[name], second[name]) for name in first)


class _Halving(torch.optim.SGD):
    """Puts other memory behind its gradients, as old optimizers do."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.data = param.grad.data * 0.5
        super().step()


def test_an_optimizer_may_give_its_gradients_other_memory() -> None:
    def trained(strategy: Any) -> dict[str, torch.Tensor]:
        def body(world: Any) -> Any:
            model = net()
            optimizer = _Halving(model.parameters(), lr=0.1)
            model, optimizer = wingbeat.distribute(model, optimizer, strategy, world=world)
            train(model, optimizer, range(4))
            return weights(model)

        return on(2, body)[0]

    dear = trained(wingbeat.DeAR(plan="fixed", mb=0.001))
    for name, weight in trained(wingbeat.AllReduce(mb=0.001)).items():
        torch.testing.assert_close(dear[name], weight, rtol=1e-5, atol=1e-6)


class _Failing(torch.optim.SGD):
    """Fails once, when told to."""

    fail = False

    def step(self, closure: Any = None) -> None:
        if self.fail:
            self.fail = False
            raise ArithmeticError
        super().step()


def test_an_exception_in_a_late_update_leaves_later_gradients_alone() -> None:
    def body(world: Any) -> None:
        model = nn.Linear(4, 4, bias=False)
        optimizer = _Failing(model.parameters(), lr=0.1)
        strategy = wingbeat.DeAR(plan="fixed")
        model, optimizer = wingbeat.distribute(model, optimizer, strategy, world=world)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        mine = torch.full((4, 4), 7.0)
        with torch._C.DisableTorchFunctionSubclass():
            model._parameters["weight"].grad = mine
        vars(optimizer)["fail"] = True  # an assignment would have the update made before
        with pytest.raises(ArithmeticError):
            model.synchronize()
        assert model._parameters["weight"].grad is mine
        assert not engine(model).stepper.stepping

    on(2, body)


@pytest.mark.parametrize("sharded", [False, True])
def test_one_gradient_replaced_unseen_counts_and_unused_ones_are_none(sharded: bool) -> None:
    def body(world: Any) -> Any:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        strategy = wingbeat.DeAR(plan="fixed", mb=0.001, shard_optimizer=sharded)
        model, optimizer = wingbeat.distribute(model, optimizer, strategy, world=world)
        param, unused = model.head._parameters["weight"], model.spare._parameters["weight"]
        changes = []
        for step in range(2):
            before = param.detach().clone()
            optimizer.zero_grad()
            backward(model, world.rank, step)
            if step == 1:
                param.grad = torch.ones(3, 7)
            optimizer.step()
            model.synchronize()
            assert unused.grad is None
            changes.append(param.detach() - before)
        return changes[1]

    for change in on(2, body):
        torch.testing.assert_close(change, torch.full((3, 7), -0.5))


@pytest.mark.parametrize("clips", [False, True])
def test_a_backward_cut_short_on_one_rank_leaves_the_ranks_in_step(clips: bool) -> None:
    """All drop that batch; the collectives of the next one still match."""

    def body(world: Any) -> dict[str, torch.Tensor]:
        model = net()
        strategy = wingbeat.DeAR(plan="fixed", mb=0.0004)
        model, optimizer = wingbeat.distribute(
            model, sgd(model.parameters()), strategy, world=world
        )
        for step in range(5):
            optimizer.zero_grad()
            handle = None
            if step in (1, 3) and world.rank == 1:
                handle = model.second.register_full_backward_hook(_trap)
            try:
                backward(model, world.rank, step)
            except ZeroDivisionError:
                assert handle is not None
            if handle is not None:
                handle.remove()
            if step not in (1, 3):
                if clips:
                    optimizer.clip_grad_norm_(0.05)
                optimizer.step()
        return weights(model)

    first, second = on(2, body)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def _trap(*_args: Any) -> None:
    raise ZeroDivisionError


class Late:
    """A handle of what has not come yet, as long as nobody waits for it."""

    def __init__(self, handle: Any) -> None:
        self.wait, self.wait_received, self.jobs = handle.wait, handle.wait_received, handle.jobs

    def done(self) -> bool:
        return False


def test_an_optimizer_that_notes_something_steps_on_one_bucket_at_a_time() -> None:
    """What is set inside of its own step is not what a user sets between two."""

    class Noting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.busy = True
            loss = torch.optim.SGD.step.__wrapped__(self, closure)  # type: ignore[attr-defined]
            self.busy = False
            return loss

    def noting(params: Any) -> torch.optim.Optimizer:
        made = Noting(params, lr=0.1)
        made.busy = False
        return made

    def body(world: Any) -> None:
        model, optimizer = distributed(world, noting, shard_optimizer=False)
        assert engine(model).update.in_parts
        for step in range(2):
            optimizer.zero_grad()
            backward(model, world.rank, step)
            optimizer.step()
        due = {slot.name: slot.bucket for slot in engine(model).slots}
        for bucket in {due[name] for name in due if due[name] is not due["first.weight"]}:
            bucket.handle = Late(bucket.handle)
        model.first(torch.ones(1, 6))
        assert due["first.weight"].due is False
        assert due["head.weight"].due
        optimizer.lr_seen = 0.1
        assert due["head.weight"].due is False

    on(2, body)


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_closure_may_clip_what_it_has_made(sharded: bool, hooked: bool) -> None:
    """With a hook the step is made at once, and its gradients made whole in the closure's."""

    def trained(strategy: Any) -> list[dict[str, torch.Tensor]]:
        def body(world: Any) -> dict[str, torch.Tensor]:
            model = net()
            model, optimizer = wingbeat.distribute(
                model, sgd(model.parameters()), strategy, world=world
            )
            if hooked:
                optimizer.register_step_post_hook(lambda *_: None)
            for step in range(4):

                def closure(step: int = step) -> torch.Tensor:
                    optimizer.zero_grad()
                    loss: torch.Tensor = model(batch(step, world.rank)).square().mean()
                    loss.backward()
                    optimizer.clip_grad_norm_(0.05)
                    return loss

                optimizer.step(closure)
            return weights(model)

        return on(2, body)

    usual = trained(wingbeat.AllReduce(mb=0.001))[0]
    for found in trained(wingbeat.DeAR(plan="fixed", mb=0.001, shard_optimizer=sharded)):
        assert_same(found, usual, 1e-5)
