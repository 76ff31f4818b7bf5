"""Workers that run out of batches one after the other, rank 0 first."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import wingbeat
from helpers.training import TINY_MB, assert_same, on, weights
from wingbeat.engine.join_context import _Batch, _JoinContext
from wingbeat.errors import UsageError

BATCHES = (1, 4, 3)
"""Of ranks 0, 1 and 2."""

STRATEGIES = [
    wingbeat.AllReduce(mb=TINY_MB),
    wingbeat.DeAR(plan="fixed", mb=TINY_MB),
    wingbeat.DeAR(plan="fixed", mb=TINY_MB, shard_optimizer=True),
]
strategies = pytest.mark.parametrize("strategy", STRATEGIES, ids=["allreduce", "dear", "sharded"])


def _model() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2))
    rng = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=rng))
    return model


def _made(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


def _loss(model: Any, step: int, rank: int) -> Tensor:
    rng = torch.Generator().manual_seed(10 * step + rank)
    loss: Tensor = model(torch.randn(6, 4, generator=rng)).square().mean()
    return loss


def _alone(by_all: bool) -> dict[str, Tensor]:
    """What the workers do, by one: buffers are those of the last that still trains, as in DDP."""
    model = _model()
    optimizer, scheduler = _made(model)
    kept = [copy.deepcopy(dict(model.named_buffers())) for _ in BATCHES]
    for step in range(max(BATCHES)):
        active = [rank for rank, count in enumerate(BATCHES) if step < count]
        optimizer.zero_grad()
        before = kept[active[-1]]
        for rank in active:
            model.load_state_dict(before, strict=False)
            (_loss(model, step, rank) / (len(BATCHES) if by_all else len(active))).backward()
            kept[rank] = copy.deepcopy(dict(model.named_buffers()))
        optimizer.step()
        scheduler.step()
    return model.state_dict()


def _joined(strategy: Any, by_all: bool) -> Callable[[Any], Any]:
    def body(world: Any) -> Any:
        model = _model()
        optimizer, scheduler = _made(model)
        model, optimizer = wingbeat.distribute(model, optimizer, strategy, world=world)
        scale = 1.0 / world.size
        with model.join(divide_by_initial_world_size=by_all):
            for step in range(BATCHES[world.rank]):
                optimizer.zero_grad()
                _loss(model, step, world.rank).backward()
                optimizer.step()
                scheduler.step()
        found = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])
        assert model._engine.scale == scale
        # Once more with all, which must not be taken for workers out of step.
        optimizer.zero_grad()
        _loss(model, 9, 0).backward()
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.step()
        return *found, copy.deepcopy(model.state_dict())

    return body


@strategies
@pytest.mark.parametrize("by_all", [True, False])
def test_rank_zero_runs_out_first(strategy: Any, by_all: bool) -> None:
    """With running statistics and a scheduler, both of which stand still on rank 0."""
    first, *others = on(3, _joined(strategy, by_all))
    for other in others:
        assert_same(other, first)
    for name, wanted in _alone(by_all).items():
        torch.testing.assert_close(first[0][name], wanted, rtol=1e-5, atol=1e-6, msg=name)


@strategies
def test_an_exception_inside_ends_the_joining(strategy: Any) -> None:
    def body(world: Any) -> None:
        model = _model()
        optimizer, _ = _made(model)
        model, optimizer = wingbeat.distribute(model, optimizer, strategy, world=world)
        hooks = len(model._forward_pre_hooks)
        with pytest.raises(ArithmeticError), model.join(divide_by_initial_world_size=False):
            raise ArithmeticError
        assert len(model._forward_pre_hooks) == hooks
        assert model._engine.before_synced_forward is None
        assert not model._engine.shadowed
        for step in range(2):
            optimizer.zero_grad()
            _loss(model, step, world.rank).backward()
            optimizer.step()

    on(2, body)


def test_active_ranks_and_buffer_root_follow_announcements() -> None:
    """Also when nobody is left: then the last ones that were have what all follow."""

    def body(world: Any) -> Any:
        model = _model()
        optimizer, _ = _made(model)
        model, _ = wingbeat.distribute(model, optimizer, wingbeat.AllReduce(), world=world)
        engine: Any = model._engine
        party, seen = _JoinContext(engine, True, False), []
        for doing in ([2, 2, 2], [0, 1, 2], [0, 2, 0], [0, 0, 0]):
            most = party.announce(_Batch(doing[world.rank]))
            seen.append((int(most), list(party.active), engine.buffer_root))
        return seen

    wanted = [(2, [0, 1, 2], 2), (2, [1, 2], 2), (2, [1], 1), (0, [1], 0)]
    assert on(3, body) == [wanted] * 3


def test_workers_are_in_step_again_after_joining() -> None:
    """Steps of one that has run out do not count; those that it makes afterwards do."""

    def body(world: Any) -> None:
        model = _model()
        optimizer, _ = _made(model)
        model, optimizer = wingbeat.distribute(model, optimizer, wingbeat.AllReduce(), world=world)
        with model.join():
            for step in range(1 + world.rank):
                optimizer.zero_grad()
                _loss(model, step, world.rank).backward()
                optimizer.step()
        _loss(model, 5, world.rank).backward()
        if world.rank == 0:
            optimizer.step()
        with pytest.raises(UsageError, match=r"rank 0 3, rank 1 2"):
            _loss(model, 6, world.rank).backward()

    on(2, body)


def test_statistics_of_batches_that_were_not_synchronised_reach_all() -> None:
    def body(world: Any) -> dict[str, Tensor]:
        model = _model()
        optimizer, _ = _made(model)
        model, optimizer = wingbeat.distribute(model, optimizer, wingbeat.AllReduce(), world=world)
        with model.join():
            _loss(model, 0, world.rank).backward()
            optimizer.step()
            if world.rank == 1:
                with model.no_sync():
                    _loss(model, 1, world.rank).backward()
        return {name: b.clone() for name, b in model.named_buffers()}

    first, second = on(2, body)
    assert_same(first, second)
    assert int(first["1.num_batches_tracked"]) == 2


def test_a_batch_counts_once_though_its_forward_is_computed_again() -> None:
    """Only rank 1 has a batch so large that it computes activations again in backward."""

    def body(world: Any) -> dict[str, Tensor]:
        model = _model()
        optimizer, _ = _made(model)
        model, optimizer = wingbeat.distribute(model, optimizer, wingbeat.AllReduce(), world=world)
        run = functools.partial(checkpoint, model, use_reentrant=False) if world.rank else model
        with model.join():
            for step in range(1 + world.rank):
                optimizer.zero_grad()
                with model.no_sync():
                    _loss(run, 2 * step, world.rank).backward()
                _loss(run, 2 * step + 1, world.rank).backward()
                optimizer.step()
        return weights(model)

    first, second = on(2, body, timeout=5.0)
    assert_same(first, second)


def _clipped(strategy: Any, twice: bool) -> list[dict[str, Tensor]]:
    """Rank 0 has two batches and rank 1 four; the weights of both."""

    def body(world: Any) -> dict[str, Tensor]:
        model = nn.Sequential(_model()[0], nn.Tanh())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        model, optimizer = wingbeat.distribute(model, optimizer, strategy, world=world)
        with model.join():
            for step in range(2 + 2 * world.rank):
                optimizer.zero_grad()
                for part in range(1 + twice):
                    _loss(model, 2 * step + part, world.rank).backward()
                if twice or step == 0:
                    optimizer.clip_grad_norm_(0.1)
                optimizer.step()
        return weights(model)

    return on(2, body, timeout=5.0)


@pytest.mark.parametrize(
    ("strategy", "twice"),
    [(STRATEGIES[1], True), (STRATEGIES[1], False), (STRATEGIES[2], False)],
    ids=["dear-after two backwards", "dear-in one step only", "sharded-in one step only"],
)
def test_clipping_need_not_follow_each_backward(strategy: Any, twice: bool) -> None:
    """Whoever has run out cannot know when the others clip; under AllReduce it need not."""
    first, second = _clipped(strategy, twice)
    assert_same(first, second)
    assert_same(first, _clipped(STRATEGIES[0], twice)[0], 1e-5)


def test_join_inside_of_another_models_join_raises() -> None:
    """A worker without batches would wait for one model's batches, and the others for both."""

    def body(world: Any) -> None:
        models = []
        for _ in range(2):
            model: Any = _model()
            optimizer, _ = _made(model)
            models.append(wingbeat.distribute(model, optimizer, STRATEGIES[1], world=world))
        (first, optimizer), (second, _) = models
        with first.join():
            with pytest.raises(UsageError, match=r"join\(\) inside of another model's join"):
                second.join().__enter__()
            _loss(first, 0, world.rank).backward()
            optimizer.step()
        with second.join():
            _loss(second, 0, world.rank).backward()

    on(2, body)
