"""Servers that update against workers that do: the same bits, whatever happens in between."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import wingbeat
from helpers import accelerator
from helpers.amounts import each_once
from helpers.server_update import compare, distributed, divided, momentum, plain, strategy
from helpers.training import (
    TINY_MB,
    Make,
    adamw,
    assert_same,
    backward,
    engine,
    net,
    on,
    sgd,
    state_of,
    train,
    weights,
)
from wingbeat.methods.parameter_server.server_update import _truths

MAKES: dict[str, Make] = {
    "sgd": sgd,
    "nesterov": momentum(nesterov=True, weight_decay=0.01, foreach=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.02),
    "adamw_amsgrad": adamw,
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05, lr_decay=0.01),
    "radam": lambda params: torch.optim.RAdam(params, lr=0.01),
    "tensor_lr": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.02), foreach=False),
}


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_server_update_equals_worker_update_for_every_optimizer(make: Make) -> None:
    compare(2, make, plain)


@pytest.mark.parametrize(
    ("size", "pull", "mb"), each_once([3, 2, 1], ["ready", "start"], [TINY_MB, 25.0])
)
def test_server_update_gives_same_weights_and_state(size: int, pull: str, mb: float) -> None:
    compare(size, adamw, plain, pull=pull, mb=mb)


@pytest.mark.parametrize(
    "options",
    [
        {"placement": "whole", "pull": "start", "order": "random"},
        {"pull": "start", "order": "forward", "classes": 1},
        {"order": "urgent", "slice": 7},
        {"servers": 3, "classes": 3, "threshold": (0.8, 0.4), "slice": 30, "pushes": False},
    ],
    ids=["vanilla", "tictac", "p3", "sliced"],
)
def test_server_update_in_any_order_of_messages(options: Any) -> None:
    compare(2, adamw, plain, **options)


def test_unused_parameters_stay_unchanged() -> None:
    def body(model: Any, optimizer: Any, rank: int) -> None:
        for step in range(8):
            # Nobody, then the last rank alone, then nobody, then everyone.
            model.use_spare = (step in (2, 3) and rank == 2) or step == 6
            train(model, optimizer, [step])

    compare(3, adamw, body)


def test_zeroed_gradients_count_as_used() -> None:
    def body(model: Any, optimizer: Any, rank: int) -> None:
        for step in range(5):
            model.use_spare = step == 1
            optimizer.zero_grad(set_to_none=False)
            backward(model, rank, step)
            optimizer.step()

    compare(3, adamw, body)


def test_accumulated_gradients_are_applied() -> None:
    def body(model: Any, optimizer: Any, rank: int) -> None:
        for step in range(5):
            optimizer.zero_grad()
            with model.no_sync():
                backward(model, rank, 20 + step)
            backward(model, rank, 30 + step)
            if step % 2:
                backward(model, rank, 40 + step)
            optimizer.step()

    compare(3, adamw, body)


def test_dropped_gradients_and_empty_steps() -> None:
    def body(model: Any, optimizer: Any, rank: int) -> None:
        for step in range(6):
            optimizer.zero_grad()
            backward(model, rank, step)
            if step % 3 == 1:
                optimizer.zero_grad()
                optimizer.step()
            if step % 3 == 2:
                optimizer.zero_grad()
                backward(model, rank, 30 + step)
            optimizer.step() if step % 3 != 1 else None

    compare(3, adamw, body)


@pytest.mark.parametrize("pull", ["ready", "start"])
def test_gradients_set_by_user_are_applied(pull: str) -> None:
    def body(model: Any, optimizer: Any, rank: int) -> None:
        train(model, optimizer, range(2))
        for step in range(2):
            optimizer.zero_grad()
            for number, param in enumerate(model.parameters()):
                if number % 3 != step:
                    param.grad = torch.full_like(param, 0.1 * (number + step))
            optimizer.step()
        train(model, optimizer, range(2, 4))

    compare(3, adamw, body, pull=pull)


def test_modified_gradients_replace_sums() -> None:
    def body(model: Any, optimizer: Any, rank: int) -> None:
        for step in range(6):
            optimizer.zero_grad()
            backward(model, rank, step)
            if step == 1:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            if step == 2:
                optimizer.clip_grad_norm_(0.05)
            if step == 3:
                for param in model.parameters():
                    if param.grad is not None:
                        param.grad = param.grad * 0.5
            if step == 4:
                model.head.weight.grad = None
            optimizer.step()

    compare(3, adamw, body)


def test_gradients_assigned_to_other_parameter() -> None:
    """Each is still in the place of the one that it was made for, when all are put in theirs."""

    def body(model: Any, optimizer: Any, rank: int) -> None:
        model.use_spare = True
        for step in range(4):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            backward(model, rank, step)
            one, other = model.second.bias, model.spare.bias
            one.grad, other.grad = other.grad, (other if step == 3 else one).grad
            optimizer.step()

    compare(2, adamw, body, mb=25.0)


@pytest.mark.parametrize("reader", [0, 1, 2])
def test_gradients_read_on_one_rank_are_complete(reader: int) -> None:
    """Others clip, step, add to them or drop them meanwhile."""

    def body(model: Any, optimizer: Any, rank: int) -> None:
        for step in range(8):
            optimizer.zero_grad()
            backward(model, rank, step)
            if rank == reader or not divided(model):
                assert sum(p.grad.norm() for p in model.parameters() if p.grad is not None) > 0
            if step % 4 == 1:
                optimizer.clip_grad_norm_(0.05)
            if step % 4 == 2:
                continue
            if step % 4 == 3:
                backward(model, rank, 50 + step)
            optimizer.step()

    compare(3, adamw, body)


def test_kept_gradient_stays_unchanged() -> None:
    def body(world: Any) -> None:
        model, optimizer = distributed(world)
        train(model, optimizer, range(2))
        optimizer.zero_grad()
        backward(model, world.rank, 2)
        bits = model.head.weight.grad.clone()
        kept = model.head.weight.grad
        optimizer.step()
        model.synchronize()
        assert torch.equal(kept, bits)
        train(model, optimizer, range(3, 5))
        assert torch.equal(kept, bits)

    on(2, body)


# -- parameters ------------------------------------------------------------------------------


def test_non_contiguous_parameters() -> None:
    def turned(params: Any) -> torch.optim.Optimizer:
        params = list(params)
        for param in params:
            if param.dim() == 2:
                param.data = param.data.t().contiguous().t()
        assert not params[1].is_contiguous()
        return adamw(params)

    compare(3, turned, plain, tolerance=1e-6)


@pytest.mark.parametrize("when", ["after the step", "before the backward", "before the step"])
def test_parameters_changed_by_user_are_sent(when: str) -> None:
    def change(model: Any, step: int) -> None:
        for number, param in enumerate(model.parameters()):
            if step % 2:
                param.data = param.data.clone()
            if (number + step) % 3:
                param.data.clamp_(-0.4, 0.4)

    def body(model: Any, optimizer: Any, rank: int) -> None:
        for step in range(6):
            optimizer.zero_grad()
            if when == "before the backward":
                change(model, step)
            backward(model, rank, step)
            if when == "before the step":
                change(model, step)
            optimizer.step()
            if when == "after the step":
                change(model, step)

    compare(3, adamw, body)


def test_negative_zero_counts_as_change() -> None:
    def body(world: Any) -> None:
        model, optimizer = distributed(world, lambda params: torch.optim.SGD(params, lr=0.1))
        train(model, optimizer, range(3))
        with torch.no_grad():
            model.head.weight.zero_()
        for sign in (False, True):
            optimizer.zero_grad()
            if sign:
                model.head.weight.data.neg_()  # which is equal to what it was
            for param in model.parameters():
                param.grad = torch.zeros_like(param)
            optimizer.step()
            assert bool(torch.signbit(model.head.weight.detach()).all()) is sign

    on(2, body)


def test_only_changed_slices_are_sent() -> None:
    def body(world: Any) -> tuple[int, int]:
        model, optimizer = distributed(world)
        train(model, optimizer, range(3))
        remote = engine(model).update._remote
        load, sent = remote.load, []
        remote.load = lambda each, *args: (sent.append(each), load(each, *args))
        train(model, optimizer, range(3, 6))
        with torch.no_grad():
            model.head.bias[0] = float("nan")
        train(model, optimizer, range(6, 7))
        once = len(sent)
        train(model, optimizer, range(7, 9))  # a NaN is no other than it was
        return once, len(sent)

    results = on(2, body)
    assert sum(once for once, _ in results) == 1
    assert sum(both for _, both in results) == 1


def test_model_state_dict_loaded_during_training() -> None:
    def body(model: Any, optimizer: Any, rank: int) -> None:
        train(model, optimizer, range(2))
        kept = copy.deepcopy(model.state_dict())
        train(model, optimizer, range(2, 4))
        model.load_state_dict(kept)
        train(model, optimizer, range(4, 6))

    compare(3, adamw, body)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_parameters_of_two_dtypes(dtype: torch.dtype) -> None:
    make = sgd if dtype is torch.float16 else adamw  # whose epsilon is too small for it

    def halves(world: Any, update: str) -> Any:
        model = net()
        model.second.to(dtype)
        model.second.register_forward_pre_hook(lambda _, args: (args[0].to(dtype),))
        model.second.register_forward_hook(lambda _, args, out: out.float())
        model, optimizer = distributed(world, make, model, update)
        train(model, optimizer, range(5))
        return weights(model), state_of(optimizer)

    want = on(2, lambda world: halves(world, "worker"))
    assert_same(on(2, lambda world: halves(world, "server")), want)


def test_second_optimizer_for_other_parameters() -> None:
    """In the same buckets: its gradients stay where they are, also if it steps last."""

    def body(world: Any, update: str, first: bool) -> Any:
        model = net()
        chosen = list(model.parameters())
        mine, other = chosen[::2], chosen[1::2]
        second = torch.optim.SGD(other, lr=0.05, momentum=0.9)
        made = adamw(mine)
        model, optimizer = wingbeat.distribute(model, made, strategy(update, mb=25.0), world=world)
        for step in range(4):
            optimizer.zero_grad()
            second.zero_grad()
            backward(model, world.rank, step)
            for each in (second, optimizer) if first else (optimizer, second):
                each.step()
                model.synchronize()
        return weights(model), state_of(optimizer)

    for first in (True, False):
        want = on(2, lambda world, f=first: body(world, "worker", f))
        assert_same(on(2, lambda world, f=first: body(world, "server", f)), want)


# -- settings --------------------------------------------------------------------------------


def test_schedulers_and_param_groups() -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        params = list(params)
        groups = [
            {"params": params[::3], "lr": 0.3, "weight_decay": 0.0, "momentum": 0.0},
            {"params": params[1::3], "lr": 0.05, "nesterov": True},
            {"params": params[2::3][::-1], "weight_decay": 0.1},
        ]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01)

    def body(model: Any, optimizer: Any, rank: int) -> None:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=[0.3, 0.2, 0.1], total_steps=8
        )
        for step in range(6):
            train(model, optimizer, [step])
            scheduler.step()
            optimizer.param_groups[1]["dampening"] = 0.0

    compare(3, make, body)


def test_different_settings_between_ranks_raise() -> None:
    def body(world: Any) -> None:
        model, optimizer = distributed(world)
        train(model, optimizer, range(2))
        optimizer.param_groups[0]["lr"] = 0.01 * (1 + world.rank)
        with pytest.raises(wingbeat.errors.PeerError, match=r"other settings .* same on all ranks"):
            train(model, optimizer, range(2, 4))

    on(2, body)


def test_numpy_settings_are_accepted() -> None:
    import numpy as np

    def body(model: Any, optimizer: Any, rank: int) -> None:
        for step in range(3):
            optimizer.param_groups[0]["lr"] = np.float64(0.1) / (step + 1)
            train(model, optimizer, [step])

    compare(2, sgd, body)


def _scaler_loop(model: Any, optimizer: Any, rank: int, clip: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(5):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank)))
        loss = loss.square().mean() * (float("inf") if step == 1 and rank == 1 else 1.0)
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler_skips_same_steps_on_all_ranks(fused: bool, clip: bool) -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=0.02, fused=fused)

    def body(model: Any, optimizer: Any, rank: int) -> None:
        _scaler_loop(model, optimizer, rank, clip)

    # Where a vector ends, the fused kernel rounds otherwise.
    compare(3, make, body, tolerance=1e-6 if fused else 0.0)


def test_closures_and_hooks() -> None:
    seen: list[tuple[str, float]] = []

    def body(model: Any, optimizer: Any, rank: int) -> None:
        def after(*_args: Any) -> None:
            seen.append((str(rank), float(model.head.weight.sum())))

        handle = optimizer.register_step_post_hook(after)
        for step in range(3):

            def closure(step: int = step) -> Any:
                optimizer.zero_grad()
                loss = model(torch.ones(2, 6) * (rank + step)).square().mean()
                loss.backward()
                return loss

            assert optimizer.step(closure) > 0
        handle.remove()

    compare(2, adamw, body)
    half = len(seen) // 2
    assert sorted(seen[:half]) == sorted(seen[half:])


@pytest.mark.skipif(bool(accelerator.why_not()), reason=accelerator.why_not())
def test_truths_of_flags_on_two_devices_are_in_their_order() -> None:
    accelerator.load().late_seed(0)
    first, second = (torch.device(accelerator.NAME, index) for index in range(2))
    pairs = [(True, first), (False, second), (False, first), (True, second)]
    flags = [torch.tensor(value).to(device) for value, device in pairs]
    assert _truths([flags[0], False, *flags[1:], True]) == [True, False, False, False, True, True]
