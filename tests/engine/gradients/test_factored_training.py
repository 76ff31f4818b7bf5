"""Training with summed low-rank factors: every schedule is right, and whatever users do with it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import wingbeat
from helpers import late
from helpers.training import assert_same, engine, on, state_of, weights
from wingbeat.codecs.lowrank import Factors
from wingbeat.compression import LowRank
from wingbeat.errors import PeerError, UsageError
from wingbeat.transport import loopback

SIZE, STEPS = 3, 4
LOW = LowRank(rank=2, auto_disable=False)
MB = 0.02


class Wide(nn.Module):
    """A convolution, a matrix, another that only some steps use, and what is too small."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 24, 3)
        self.deep = nn.Linear(96, 40)
        self.spare = nn.Linear(40, 40)
        self.head = nn.Linear(40, 3)
        self.use_spare = False
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.deep(torch.tanh(self.conv(x)).flatten(1))
        x = torch.tanh(self.spare(x)) if self.use_spare else torch.tanh(x)
        out: torch.Tensor = self.head(x)
        return out


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(3, 4, 4, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def loss(model: Any, step: int, rank: int) -> torch.Tensor:
    out: torch.Tensor = model(batch(step, rank).to(next(model.parameters()).dtype))
    return out.float().square().mean()


def reduced(wire: Any = LOW) -> Any:
    return wingbeat.AllReduce(compression=wire, mb=MB, first_mb=MB)


def overlapped(wire: Any = LOW, **options: Any) -> Any:
    return wingbeat.DeAR(compression=wire, plan="fixed", mb=MB, edge_mb=MB, **options)


STRATEGIES = {
    "allreduce": reduced,
    "dear": overlapped,
    "sharded": functools.partial(overlapped, shard_optimizer=True),
}


def begin(world: Any, strategy: Any, model: Any = None, lr: float = 0.05) -> tuple[Any, Any]:
    model = Wide() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return wingbeat.distribute(model, optimizer, strategy, world=world)


def usual(model: Any, optimizer: Any, rank: int) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, step, rank).backward()
        optimizer.step()


def clipped(model: Any, optimizer: Any, rank: int) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, step, rank).backward()
        optimizer.clip_grad_norm_(0.05)
        optimizer.step()


def scaled(model: Any, optimizer: Any, rank: int) -> None:
    """One worker's gradients overflow in one step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for step in range(STEPS + 2):
        optimizer.zero_grad()
        found = loss(model, step, rank)
        if step == 2 and rank == 1:
            found = found * float("inf")
        scaler.scale(found).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() < 64.0 * 2 ** (STEPS // 2 + 1)


def accumulated(model: Any, optimizer: Any, rank: int) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        with model.no_sync():
            loss(model, 2 * step, rank).backward()
        loss(model, 2 * step + 1, rank).backward()
        optimizer.step()


def unused(model: Any, optimizer: Any, rank: int) -> None:
    """In some steps a layer is nobody's, in others only some workers'."""
    for step in range(STEPS + 2):
        optimizer.zero_grad()
        model.use_spare = (step + rank) % 3 == 0 if step > 1 else step == 1
        loss(model, step, rank).backward()
        optimizer.step()


def looked_at(model: Any, optimizer: Any, rank: int) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, step, rank).backward()
        if step % 2:
            for param in model.parameters():
                assert param.grad is None or bool(torch.isfinite(param.grad + 0).all())
        optimizer.step()


def dropped(model: Any, optimizer: Any, rank: int) -> None:
    for step in range(STEPS):
        loss(model, step, rank).backward()
        if step == 1:
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()


HABITS = [usual, clipped, scaled, accumulated, unused, looked_at, dropped]


@pytest.mark.parametrize("habit", HABITS)
def test_schedules_give_the_same_weights_on_all_workers(habit: Any) -> None:
    """Each sums the same factors of the same buckets; norms of parts differ in the last bits."""

    def body(world: Any) -> list[dict[str, torch.Tensor]]:
        found = []
        for make in STRATEGIES.values():
            model, optimizer = begin(world, make())
            habit(model, optimizer, world.rank)
            wingbeat.release(model, optimizer)
            found.append(weights(model))
        return found

    first, *others = on(SIZE, body)
    for other in others:
        assert_same(other, first)
    assert all(bool(p.isfinite().all()) for p in first[0].values())
    for each in first[1:]:
        assert_same(each, first[0], 1e-5)
    assert not torch.equal(first[0]["deep.weight"], weights(Wide())["deep.weight"])


@pytest.mark.parametrize("interfaces", [1, 2])
def test_unsent_gradients_survive_a_change_of_buckets(interfaces: int) -> None:
    """At lr 1 the weights and what residuals lack are all that was ever put in."""

    def body(world: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        model = nn.Linear(64, 32, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = wingbeat.distribute(model, optimizer, reduced(), world=world)
        given = torch.zeros(32, 64)
        for step in range(4):
            generator = torch.Generator().manual_seed(10 * step + world.rank)
            pull = torch.randn(32, 64, generator=generator)
            given += pull
            optimizer.zero_grad()
            (model.weight * pull).sum().backward()
            optimizer.step()
            if step == 1:
                engine(model).bucketing.stale = True
        left = engine(model).compression.state_dict()["residuals"]["weight"]
        return model.weight.detach().clone(), left, given

    with late.open_worlds(SIZE, interfaces) as (members, _):
        results = loopback.run(members, body)
    moved = -results[0][0]
    left = torch.stack([left for _, left, _ in results]).sum(0)
    given = torch.stack([given for *_, given in results]).sum(0) / SIZE
    torch.testing.assert_close(moved + left, given, rtol=1e-4, atol=1e-4)
    assert float(left.norm()) > 0.1 * float(given.norm())


@pytest.mark.parametrize("kind", list(STRATEGIES))
def test_a_resumed_run_continues_bit_for_bit(kind: str) -> None:
    """Residuals and the factors' starts are in the state."""

    def train(model: Any, optimizer: Any, steps: range, rank: int) -> None:
        for step in steps:
            optimizer.zero_grad()
            loss(model, step, rank).backward()
            optimizer.step()

    def body(world: Any) -> bool:
        model, optimizer = begin(world, STRATEGIES[kind]())
        train(model, optimizer, range(3), world.rank)
        state, then = state_of(optimizer), weights(model)
        train(model, optimizer, range(3, 6), world.rank)
        wanted = weights(model)
        wingbeat.release(model, optimizer)
        again, other = begin(world, STRATEGIES[kind]())
        train(again, other, range(7, 8), world.rank)
        again.load_state_dict(then)
        other.load_state_dict(state)
        train(again, other, range(3, 6), world.rank)
        assert_same(weights(again), wanted)
        return True

    assert all(on(2, body))


def test_a_state_loaded_by_one_worker_is_an_error() -> None:
    def body(world: Any) -> str:
        model, optimizer = begin(world, reduced())
        usual(model, optimizer, world.rank)
        state = state_of(optimizer)
        usual(model, optimizer, world.rank)
        if world.rank == 0:
            optimizer.load_state_dict(state)
        optimizer.zero_grad()
        with pytest.raises(PeerError) as caught:
            loss(model, 0, world.rank).backward()
        return str(caught.value)

    for said in on(2, body):
        assert "load the optimizer's state on all workers or on none" in said


def test_damaged_starts_in_a_state_are_refused() -> None:
    def body(world: Any) -> str:
        model, optimizer = begin(world, reduced())
        usual(model, optimizer, world.rank)
        state = state_of(optimizer)
        state["wingbeat"]["starts"]["deep.weight"][0, 0] = float("nan")
        with pytest.raises(UsageError) as caught:
            optimizer.load_state_dict(state)
        return str(caught.value)

    for said in on(2, body):
        assert "starts is no dict of finite matrices" in said


def test_parts_of_more_workers_load_with_the_starts_of_all() -> None:
    def parts(world: Any) -> Any:
        model, optimizer = begin(world, reduced())
        usual(model, optimizer, world.rank)
        return optimizer.residual_state_dict()

    saved = on(3, parts)

    def body(world: Any) -> dict[str, torch.Tensor]:
        model, optimizer = begin(world, reduced())
        usual(model, optimizer, world.rank)
        optimizer.load_residuals(saved)
        assert_same(optimizer.residual_state_dict()["starts"], saved[0]["starts"])
        usual(model, optimizer, world.rank)
        return weights(model)

    first, second = on(2, body)
    assert_same(first, second)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_low_rank_training_in_other_dtypes_is_equal_on_all_workers(dtype: torch.dtype) -> None:
    def body(world: Any) -> dict[str, torch.Tensor]:
        model, optimizer = begin(world, overlapped(), Wide().to(dtype))
        usual(model, optimizer, world.rank)
        wingbeat.release(model, optimizer)
        return weights(model)

    first, second = on(2, body)
    assert_same(first, second)
    assert all(bool(p.isfinite().all()) for p in first.values())


def test_channels_last_and_transposed_weights_are_matrices_by_their_strides() -> None:
    """Their elements are in another order in memory; a matrix of rank 1 arrives all the same."""

    def body(world: Any) -> torch.Tensor:
        weight = torch.zeros(64, 32).T
        model = nn.Linear(64, 32, bias=False)
        model.weight = nn.Parameter(weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        wire = LowRank(rank=1, auto_disable=False)
        model, optimizer = wingbeat.distribute(model, optimizer, reduced(wire), world=world)
        pull = torch.outer(torch.arange(32.0), torch.arange(64.0).cos())
        (model.weight * pull).sum().backward()
        optimizer.step()
        return model.weight.detach() + pull

    for rest in on(2, body):
        assert float(rest.abs().max()) < 1e-4


def test_a_worker_without_batches_takes_part() -> None:
    def body(world: Any) -> dict[str, torch.Tensor]:
        model, optimizer = begin(world, overlapped())
        with model.join():
            for step in range(STEPS - world.rank):
                optimizer.zero_grad()
                loss(model, step, world.rank).backward()
                optimizer.step()
        wingbeat.release(model, optimizer)
        return weights(model)

    first, second = on(2, body)
    assert_same(first, second)


@pytest.mark.parametrize(
    ("wire", "factored"),
    [
        ("lowrank@2:auto_disable=false", True),
        ("lowrank@2:auto_disable=false:groups=head.*@fp32", True),
        ("lowrank@2:bits=8:auto_disable=false", False),
        ("sketch@4:auto_disable=false:groups=deep.*@lowrank@2", False),
        ("lowrank@2:feedback=false:auto_disable=false", True),
        ("lowrank@2:share=0.5:total=4:auto_disable=false", True),
        ("lowrank@2", True),
    ],
)
def test_factors_are_summed_if_every_group_is_dense_or_unsketched_low_rank(
    wire: str, factored: bool
) -> None:
    """A trial takes turns with fp32, and residuals go along."""

    def body(world: Any) -> tuple[bool, dict[str, torch.Tensor]]:
        model, optimizer = begin(world, reduced(wire))
        usual(model, optimizer, world.rank)
        compression = engine(model).compression
        made = [compression._made[bucket][1] for bucket in engine(model).buckets]
        assert any(isinstance(each, Factors) for each in made) is factored
        wingbeat.release(model, optimizer)
        return compression.factored, weights(model)

    (found, first), (_, second) = on(2, body)
    assert found is factored
    assert_same(first, second)


def test_factors_along_a_bcube_are_equal_on_all_workers() -> None:
    """They are summed along it, as gradients are; what is sketched is refused there."""

    def body(world: Any) -> dict[str, torch.Tensor]:
        model, optimizer = begin(world, wingbeat.BML(compression=LOW))
        usual(model, optimizer, world.rank)
        wingbeat.release(model, optimizer)
        return weights(model)

    with late.open_worlds(4, 2) as (members, _):
        results = loopback.run(members, body)
    for other in results[1:]:
        assert_same(other, results[0])


@pytest.mark.parametrize("schedule", ["wfbp", "dear"])
def test_layers_are_merged_by_what_factors_cost(schedule: str) -> None:
    """The probe exchanges factors: their bytes, and two sums."""
    strategy = wingbeat.Strategy(
        plan=wingbeat.parts.Merged(steps=1), compression=LOW, schedule=schedule
    )

    def body(world: Any) -> dict[str, Any]:
        model, optimizer = begin(world, strategy)
        for step in range(8):
            optimizer.zero_grad()
            loss(model, step, world.rank).backward()
            optimizer.step()
        report = engine(model).merging.report()
        wingbeat.release(model, optimizer)
        assert report is not None
        return dict(report, weights=weights(model))

    first, second = on(2, body)
    assert_same(first["weights"], second["weights"])
    assert first["tensors"] == 8
