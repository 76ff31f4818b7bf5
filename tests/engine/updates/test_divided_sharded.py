"""The sharded strategy against the unsharded one: the same bits, whatever happens in between."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import wingbeat
from helpers.failing import FailsInBackward
from helpers.training import (
    TINY_MB,
    Make,
    adamw,
    assert_same,
    backward,
    compare,
    distributed,
    engine,
    net,
    on,
    outcome,
    sgd,
    state_of,
    train,
    weights,
)
from wingbeat.engine.updates.divided import DividedState
from wingbeat.errors import MismatchError, UsageError


def _plain(model: Any, optimizer: Any, rank: int) -> None:
    train(model, optimizer, range(6))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("mb", [TINY_MB, 25.0])
def test_the_weights_and_the_state_are_those_without_shards(
    size: int, make: Make, mb: float
) -> None:
    compare(size, make, _plain, mb=mb)


def test_unused_parameters_are_not_updated_until_a_worker_uses_them() -> None:
    def body(model: Any, optimizer: Any, rank: int) -> None:
        for step in range(8):
            # Nobody, then the last rank alone, then nobody, then everyone.
            model.use_spare = (step in (2, 3) and rank == 2) or step == 6
            train(model, optimizer, [step])

    compare(3, adamw, body)


def test_sharded_optimizer_with_transposed_parameters_equals_whole() -> None:
    def turned(params: Any) -> torch.optim.Optimizer:
        params = list(params)
        for param in params:
            if param.dim() == 2:
                param.data = param.data.t().contiguous().t()
        assert not params[1].is_contiguous()
        return adamw(params)

    # Whole ones travel in the order of their memory, parts in that of elements: sums are rounded
    # in another order.
    compare(3, turned, _plain, tolerance=1e-6)


def test_sharded_optimizer_updates_parameters_with_zeroed_gradients() -> None:
    """A gradient of zeros lets momentum and weight decay go on, as in torch."""

    def body(model: Any, optimizer: Any, rank: int) -> None:
        for step in range(5):
            model.use_spare = step == 1
            optimizer.zero_grad(set_to_none=False)
            backward(model, rank, step)
            optimizer.step()

    compare(3, adamw, body)


@pytest.mark.parametrize("turn", [False, True])
def test_sharded_optimizer_after_parameters_are_changed_by_hand_equals_whole(turn: bool) -> None:
    def body(model: Any, optimizer: Any, rank: int) -> None:
        for step in range(6):
            train(model, optimizer, [step])
            for param in model.parameters():
                if turn and param.dim() == 2:
                    param.data = param.data.t().contiguous().t()
                elif step % 2:
                    param.data = param.data.clone()
                param.data.clamp_(-0.4, 0.4)

    # Turned ones are laid out as their parameters where they are whole: other vectors.
    compare(3, adamw, body, tolerance=1e-6 if turn else 0.0)


def test_a_step_without_gradients_forgets_no_parameter_on_its_way() -> None:
    """Nor one of which this worker updates no part."""

    def body(model: Any, optimizer: Any, rank: int) -> None:
        for step in range(3):
            train(model, optimizer, [step])
            optimizer.zero_grad()
            optimizer.step()

    compare(3, adamw, body)


def test_sharded_optimizer_with_two_dtypes_equals_whole() -> None:
    def halves(world: Any, sharded: bool) -> Any:
        model = net()
        model.second.bfloat16()
        model.second.register_forward_pre_hook(lambda _, args: (args[0].bfloat16(),))
        model.second.register_forward_hook(lambda _, args, out: out.float())
        model, optimizer = distributed(world, adamw, model, shard_optimizer=sharded)
        train(model, optimizer, range(5))
        return weights(model), state_of(optimizer)

    want = on(2, lambda world: halves(world, False))
    assert_same(on(2, lambda world: halves(world, True)), want)


# -- gradients ------------------------------------------------------------------------------


def test_a_step_uses_the_gradients_up() -> None:
    def body(world: Any) -> None:
        model, optimizer = distributed(world)
        train(model, optimizer, range(2))
        assert all(p.grad is None for p in model.parameters())
        with pytest.raises(UsageError, match=r"optimizer\.step\(\): .*zero_grad\(\)"):
            optimizer.step()
        backward(model, world.rank, 2)
        for param in model.parameters():  # a sum that lacks its first part
            with pytest.raises(UsageError, match=r"a gradient was read: .*zero_grad"):
                param.grad.sum()
        with pytest.raises(UsageError, match="zero_grad"):
            optimizer.clip_grad_norm_(1.0)
        with pytest.raises(UsageError, match="zero_grad"):
            optimizer.step()
        with pytest.raises(UsageError, match="zero_grad"):
            backward(model, world.rank, 3)
        with pytest.raises(UsageError, match="zero_grad"):
            optimizer.step()
        train(model, optimizer, range(2, 4))

    on(2, body)


def test_sharded_optimizer_after_a_refused_step_trains_on() -> None:
    def body(model: Any, optimizer: Any, rank: int) -> None:
        train(model, optimizer, range(3))
        if engine(model).strategy.update_part.shards:
            backward(model, rank, 77)
            with pytest.raises(UsageError):
                optimizer.step()
        train(model, optimizer, range(3, 6))

    compare(3, adamw, body)


@pytest.mark.parametrize("reader", [0, 1, 2])
def test_gradients_read_on_one_rank_are_whole(reader: int) -> None:
    """Others clip, step, add to them or drop them meanwhile."""

    def body(model: Any, optimizer: Any, rank: int) -> None:
        for step in range(8):
            optimizer.zero_grad()
            backward(model, rank, step)
            # Without shards all must read, or clipping would not match.
            if rank == reader or not engine(model).strategy.update_part.shards:
                assert sum(p.grad.norm() for p in model.parameters() if p.grad is not None) > 0
            if step % 4 == 1:
                optimizer.clip_grad_norm_(0.05)
            if step % 4 == 2:
                continue
            if step % 4 == 3:
                backward(model, rank, 50 + step)
            optimizer.step()

    compare(3, adamw, body, tolerance=1e-6)


def test_gradients_that_were_read_and_are_kept_over_a_step_stay_what_they_were() -> None:
    def body(world: Any) -> None:
        model, optimizer = distributed(world, mb=25.0)
        backward(model, world.rank, 0)
        want = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        kept = [p.grad for p in model.parameters() if p.grad is not None]
        optimizer.step()
        model.synchronize()
        assert_same(kept, want)

    on(2, body)


class _Gated(torch.optim.SGD):
    """Waits in its step where the object has an event."""

    gate: threading.Event | None = None

    def step(self, closure: Any = None) -> Any:
        if self.gate is not None:
            assert self.gate.wait(10)
        return super().step(closure)


def test_gradients_of_another_optimizer_halved_after_the_step_stay_halved() -> None:
    """Although parameters that the others gather now have been sent over them."""
    halved = threading.Event()

    def body(world: Any) -> Any:
        model = net()
        others = list(model.head.parameters())
        own = [p for name, p in model.named_parameters() if not name.startswith("head")]
        optimizer = _Gated(own, lr=0.1)
        strategy = wingbeat.DeAR(plan="fixed", shard_optimizer=True)
        model, optimizer = wingbeat.distribute(model, optimizer, strategy, world=world)
        backward(model, world.rank, 0)
        want = [p.grad.clone() / 2 for p in others]
        if world.rank == 0:
            optimizer.gate = halved  # rank 1 receives its block afterwards
        optimizer.step()
        grads = [p.grad for p in others]
        for grad in grads:
            grad.mul_(0.5)
        halved.set()
        model.synchronize()
        assert_same([p.grad for p in others], want)
        assert_same(grads, want)

    on(2, body)


def test_ranks_with_different_actions_raise() -> None:
    def body(world: Any) -> None:
        model, optimizer = distributed(world)
        train(model, optimizer, range(2))
        optimizer.zero_grad()
        backward(model, world.rank, 2)
        with pytest.raises(UsageError, match=r"rank 0 calls optimizer.step\(\) while rank 1 drops"):
            optimizer.step() if world.rank == 0 else optimizer.zero_grad()

    on(2, body)


def test_sharded_optimizer_with_different_groups_on_ranks_is_refused() -> None:
    def body(world: Any) -> None:
        model = net()
        params = list(model.parameters())
        groups = [{"params": params[:2]}, {"params": params[2:]}]
        optimizer = torch.optim.SGD(params if world.rank else groups, lr=0.1)
        strategy = wingbeat.DeAR(plan="fixed", shard_optimizer=True)
        with pytest.raises(MismatchError, match="param groups"):
            wingbeat.distribute(model, optimizer, strategy, world=world)
        assert type(optimizer) is torch.optim.SGD

    on(2, body)


def test_sharded_optimizer_of_different_classes_on_ranks_is_refused() -> None:
    def body(world: Any) -> None:
        model = net()
        optimizer = (sgd, adamw)[world.rank](model.parameters())
        strategy = wingbeat.DeAR(plan="fixed", shard_optimizer=True)
        with pytest.raises(MismatchError, match="optimizer is a"):
            wingbeat.distribute(model, optimizer, strategy, world=world)

    on(2, body)


# -- schedulers, scalers, copies ------------------------------------------------------------


def _scaler_loop(model: Any, optimizer: Any, rank: int, steps: range, bad: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in steps:
        optimizer.zero_grad()
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = model(x).square().mean()
        if bad and step == 1 and rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_skips_the_same_steps_everywhere(fused: bool) -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=0.02, fused=fused)

    def body(model: Any, optimizer: Any, rank: int) -> None:
        _scaler_loop(model, optimizer, rank, range(5), bad=True)

    # Where a vector ends, the fused kernel rounds otherwise.
    compare(3, make, body, tolerance=1e-6 if fused else 0.0)


def test_sharded_optimizer_with_bf16_gradients_gathers_unrounded_parameters() -> None:
    def body(world: Any) -> Any:
        model, optimizer = distributed(world, sgd, compression="bf16")
        train(model, optimizer, range(6))
        return weights(model)

    exact = on(3, lambda world: outcome(world, sgd, True, _plain))[0][0]
    results = on(3, body)
    for result in results:
        assert_same(result, results[0])
        for name, value in result.items():
            assert (value - exact[name]).abs().max() < 0.05 * exact[name].abs().max() + 1e-2
            assert not torch.equal(value, value.bfloat16().float()), f"{name} was rounded"


def test_a_copy_of_the_optimizer_has_the_whole_state() -> None:
    def body(world: Any) -> None:
        model, optimizer = distributed(world)
        train(model, optimizer, range(3))
        twin = copy.deepcopy(optimizer)
        assert type(twin) is torch.optim.AdamW
        assert_same(twin.state_dict(), state_of(optimizer))
        assert len(vars(optimizer)["state"]) == 0
        train(model, optimizer, range(3, 5))

    on(3, body)


def test_release_gives_the_whole_state_back() -> None:
    def body(world: Any) -> Any:
        model, optimizer = distributed(world)
        train(model, optimizer, range(3))
        state = state_of(optimizer)
        wingbeat.release(model, optimizer)
        assert type(optimizer) is torch.optim.AdamW
        assert_same(state_of(optimizer), state)
        unused = set(model.spare.parameters())
        assert set(optimizer.state) == set(model.parameters()) - unused
        train(model, optimizer, [9], rank=0)
        return weights(model)

    results = on(2, body)
    assert_same(results[0], results[1])


def test_shutdown_leaves_no_half_updated_parameter() -> None:
    def body(world: Any) -> Any:
        model, optimizer = distributed(world)
        raw = list(torch.nn.Module.parameters(model))
        train(model, optimizer, range(3))
        return model, raw

    results = on(3, body)
    for _, raw in results:
        assert_same([p.detach() for p in raw], [p.detach() for p in results[0][1]])


def test_an_exception_while_the_state_is_whole_leaves_it_divided() -> None:
    """As when a hook on the state dict, or the disk that it is written to, fails."""

    def body(model: Any, optimizer: Any, rank: int) -> None:
        def fail(*_args: Any) -> None:
            raise OSError("disk full")

        train(model, optimizer, range(2))
        handle = optimizer.register_state_dict_post_hook(fail)
        with pytest.raises(OSError, match="disk full"):
            optimizer.state_dict()
        handle.remove()
        if engine(optimizer).update.shards is not None:
            assert len(vars(optimizer)["state"]) == 0
            assert isinstance(optimizer.state, DividedState)
        train(model, optimizer, range(2, 4))

    compare(2, adamw, body)


class _Handle:
    """Notes that somebody has waited until the links are done with the buffer."""

    def __init__(self, handle: Any) -> None:
        self._handle, self.jobs, self.waited = handle, handle.jobs, False

    def wait(self) -> None:
        self._handle.wait()
        self.waited = True

    def wait_received(self) -> None:
        self._handle.wait_received()


def test_parameters_are_placed_after_the_buffers_collective_is_done() -> None:
    """A slow peer may not have read its part of the gradients yet when this worker has its own."""

    def body(world: Any) -> int:
        model, optimizer = distributed(world)
        collectives = engine(model).collectives
        scatter, gather = collectives.reduce_scatter, collectives.all_gather
        under_way: dict[int, _Handle] = {}

        def reduce_scatter(flat: Any, **options: Any) -> _Handle:
            under_way[flat.data_ptr()] = _Handle(scatter(flat, **options))
            return under_way[flat.data_ptr()]

        gathered = 0

        def all_gather(flat: Any, *args: Any, **options: Any) -> Any:
            nonlocal gathered
            if flat.data_ptr() in under_way:
                assert under_way.pop(flat.data_ptr()).waited
                gathered += 1
            return gather(flat, *args, **options)

        collectives.reduce_scatter, collectives.all_gather = reduce_scatter, all_gather
        train(model, optimizer, range(3))
        return gathered

    assert min(on(3, body)) > 6


def test_hooks_of_all_optimizers_run_once_a_step_and_see_the_users_optimizer() -> None:
    calls: list[tuple[int, Any]] = []
    main = threading.get_ident

    def note(optimizer: Any, *_args: Any) -> None:
        calls.append((main(), [len(g["params"]) for g in optimizer.param_groups]))

    def body(world: Any) -> int:
        model, optimizer = distributed(world)
        train(model, optimizer, range(3))
        return main()

    handles = [
        register_optimizer_step_pre_hook(note),
        register_optimizer_step_post_hook(note),
    ]
    try:
        threads = on(2, body)
    finally:
        for handle in handles:
            handle.remove()
    whole = [len(list(net().parameters()))]
    for thread in threads:
        assert [sizes for where, sizes in calls if where == thread] == [whole] * 6


def test_another_optimizer_is_refused_gradients_that_a_step_has_used_up() -> None:
    """It would find none, and train nothing."""

    def body(world: Any) -> None:
        model, optimizer = distributed(world)
        train(model, optimizer, [0])
        other = torch.optim.SGD(model.parameters(), lr=0.1)
        other.zero_grad()
        backward(model, world.rank, 1)
        with pytest.raises(UsageError, match="read: with shard_optimizer a step uses the grad"):
            other.step()
        before = weights(model)
        optimizer.zero_grad()
        backward(model, world.rank, 2)
        other.step()
        assert not torch.equal(before["head.bias"], weights(model)["head.bias"])

    on(2, body)


def test_backward_that_fails_on_one_rank_after_a_sharded_step_leaves_ranks_equal() -> None:
    """Part of the model is another optimizer's, so that all are looked at when backward ends."""

    def body(world: Any) -> dict[str, torch.Tensor]:
        model: Any = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        with torch.no_grad():
            for number, param in enumerate(model.parameters()):
                param.fill_(0.1 * (number + 1))
        own = torch.optim.SGD(model[0].parameters(), lr=0.1)
        other = torch.optim.SGD(model[1].parameters(), lr=0.1)
        strategy = wingbeat.DeAR(plan="fixed", shard_optimizer=True)
        model, own = wingbeat.distribute(model, own, strategy, world=world)

        def backward(fails: bool) -> None:
            hidden = model[0](torch.ones(2, 4))
            model[1](FailsInBackward.apply(hidden) if fails else hidden).sum().backward()

        for number in range(3):
            backward(fails=False)
            own.step()
            other.step()
            fails = world.rank == number % 2
            # It adds to what is used up, so that nothing is left for the other optimizer.
            said = (
                None if fails else "^backward.. for another optimizer: with shard_optimizer a step"
            )
            with pytest.raises(ArithmeticError if fails else UsageError, match=said):
                backward(fails)
            own.zero_grad()
            other.zero_grad()
        return weights(model)

    first, second = on(2, body)
    assert_same(first, second, 0.0)
