"""Training whose gradients a codec writes: nothing is lost, all workers hold the same bits."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from torch import nn

import wingbeat
from helpers.amounts import slow_except
from helpers.columns import columns
from helpers.training import assert_same, engine, net, on, sgd, train, weights
from wingbeat.collectives import Collectives
from wingbeat.compression import Half, LowRank, Sketch, TopK
from wingbeat.engine.gradients.compression import Compression
from wingbeat.errors import MismatchError, UsageError

ALWAYS = [
    Sketch(auto_disable=False),
    Sketch(bits=2, auto_disable=False),
    TopK(density=0.05, warmup=0, auto_disable=False),
    LowRank(rank=2, auto_disable=False),
    Half(),
]
LOSSY = [wire for wire in ALWAYS if not isinstance(wire, Half)]
GROUPED = Sketch(
    bits=2,
    groups={"parts.0": "fp32", "parts.1": LowRank(rank=2, bits=4), "parts.4": 5},
    auto_disable=False,
)
ENDING = Sketch(bits=2, share=0.5, total=6, auto_disable=False)
PULLED = [*LOSSY, GROUPED]
"""For models with the parameters of `Pull`."""

SIZE = 3

SERVED = ("geryon", "geryon-start", "geryon-dense")
KINDS = ("allreduce", "dear", *SERVED)


def pairs(wires: list[Any], kinds: tuple[str, ...] = KINDS, slow: tuple[str, ...] = ()) -> Any:
    """Every kind of strategy with every wire that it has; in turn, in the quick run."""
    turns = max(len(wires), len(kinds))
    quick = {(kinds[turn % len(kinds)], turn % len(wires)) for turn in range(turns)}
    found = [
        pytest.param(
            kind,
            wire,
            id=f"{kind}-{wire!r}",
            marks=pytest.mark.slow if kind in slow or (kind, number) not in quick else (),
        )
        for kind in kinds
        for number, wire in enumerate(wires)
        if not (kind in SERVED and isinstance(wire, TopK))
    ]
    return pytest.mark.parametrize(("kind", "wire"), found)


def strategy(kind: str, wire: Any, mb: float = 0.02) -> Any:
    if kind in SERVED:
        pull, back = "start" if "start" in kind else "ready", "dense" if "dense" in kind else "wire"
        options: dict[str, Any] = {"mb": mb, "servers": 2, "slice": 20_000, "encrypted": False}
        return wingbeat.Geryon(compression=wire, pull=pull, back=back, **options)
    if kind == "allreduce":
        return wingbeat.AllReduce(compression=wire, mb=mb, first_mb=mb)
    return wingbeat.DeAR(compression=wire, plan="fixed", mb=mb, edge_mb=mb)


class Pull(nn.Module):
    """Its gradient is whatever it is called with, so that a test knows what was put in."""

    SHAPES = ((40, 30), (300, 250), (7,), (), (1001,))

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(s)) for s in self.SHAPES)

    def forward(self, pulls: list[torch.Tensor | None]) -> torch.Tensor:
        pairs = zip(self.parts, pulls, strict=True)
        return sum((p * g).sum() for p, g in pairs if g is not None)


def pulls(step: int, rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, generator=generator) ** 3 for shape in Pull.SHAPES]


def mean_pulled(steps: int, size: int) -> list[torch.Tensor]:
    """What a dense run would have moved the parameters by, at lr = 1."""
    total = [torch.zeros(shape, dtype=torch.float64) for shape in Pull.SHAPES]
    for step in range(steps):
        for rank in range(size):
            for i, pull in enumerate(pulls(step, rank)):
                total[i] += pull.double() / size
    return total


def distributed_pull(world: Any, how: Any) -> tuple[Any, Any]:
    model = Pull()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return wingbeat.distribute(model, optimizer, how, world=world)


def pull(model: Any, optimizer: Any, steps: Any, rank: int) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(pulls(step, rank)).backward()
        optimizer.step()


def residuals_of(model: Any) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = engine(model).compression.state_dict()["residuals"]
    return state


def assert_nothing_lost(results: list[Any], steps: int, size: int) -> None:
    """What the parameters have moved by and all residuals make up the gradients."""
    moved, residuals = results[0][0], [residual for _, residual in results]
    for other, _ in results[1:]:
        assert_same(other, moved)
    for (name, value), wanted in zip(moved.items(), mean_pulled(steps, size), strict=True):
        total = -value.double() + sum(residual[name].double() for residual in residuals)
        torch.testing.assert_close(total, wanted, rtol=1e-4, atol=1e-4, msg=name)


@pairs(PULLED)
def test_gradients_that_were_not_sent_are_in_a_residual(kind, wire) -> None:
    def body(world: Any) -> Any:
        model, optimizer = distributed_pull(world, strategy(kind, wire))
        pull(model, optimizer, range(6), world.rank)
        return weights(model), residuals_of(model)

    results = on(SIZE, body)
    assert_nothing_lost(results, 6, SIZE)
    assert any(bool(residual.any()) for residual in results[0][1].values())


@pytest.mark.parametrize("kind", KINDS)
def test_after_its_share_nothing_is_encoded_and_no_residual_is_left(kind) -> None:
    """Three steps of six, the same on all workers; backwards that only accumulate do not count."""

    def body(world: Any) -> Any:
        model, optimizer = distributed_pull(world, strategy(kind, ENDING))
        compression = engine(model).compression
        encoding = []
        for step in range(6):
            optimizer.zero_grad()
            halves = [0.5 * each for each in pulls(step, world.rank)]
            with model.no_sync():
                model(halves).backward()
            model(halves).backward()
            encoding.append(compression.coding)
            optimizer.step()
            if step == 2:
                owed = {name: each.clone() for name, each in residuals_of(model).items()}
        assert encoding == [True] * 3 + [False] * 3
        assert any(bool(each.any()) for each in owed.values())
        assert not any(bool(each.any()) for each in residuals_of(model).values())
        return weights(model), residuals_of(model)

    assert_nothing_lost(on(SIZE, body), 6, SIZE)


def test_shards_take_the_gradients_of_groups_and_of_a_share() -> None:
    def body(world: Any, wire: Any) -> Any:
        how = wingbeat.DeAR(
            plan="fixed", mb=0.02, edge_mb=0.02, shard_optimizer=True, compression=wire
        )
        model, optimizer = distributed_pull(world, how)
        pull(model, optimizer, range(6), world.rank)
        model.synchronize()
        return weights(model), residuals_of(model)

    for wire in (GROUPED, ENDING):
        assert_nothing_lost(on(SIZE, lambda world, wire=wire: body(world, wire)), 6, SIZE)


@pytest.mark.parametrize("kind", ["allreduce", "dear", "geryon"])
def test_dense_groups_are_exact(kind) -> None:
    """In buckets of their own, and in one with others."""

    def body(world: Any, wire: Any, mb: float) -> Any:
        model, optimizer = distributed_pull(world, strategy(kind, wire, mb=mb))
        pull(model, optimizer, range(3), world.rank)
        return weights(model)

    wire = Sketch(bits=1, groups={"parts.[0234]": "fp32"}, auto_disable=False)
    plain = on(2, lambda world: body(world, "fp32", 0.02))[0]
    for mb in (0.0004, 1.0):
        first, *others = on(2, lambda world, mb=mb: body(world, wire, mb))
        for other in others:
            assert_same(other, first)
        for name, value in first.items():
            assert torch.equal(value, plain[name]) == (name != "parts.1"), name


@pytest.mark.parametrize("new_buckets", [False, True])
@pairs([*PULLED, ENDING])
def test_the_residual_of_an_unused_parameter_is_sent_when_it_is_used(
    kind, wire, new_buckets
) -> None:
    """Nobody uses what workers send for a parameter that has no gradient anywhere."""
    idle = {1: {1, 2, 3}, 4: {2}}  # parameters and the steps in which nobody uses them

    def given(step: int, rank: int) -> list[torch.Tensor | None]:
        return [None if step in idle.get(i, ()) else p for i, p in enumerate(pulls(step, rank))]

    def body(world: Any) -> Any:
        model, optimizer = distributed_pull(world, strategy(kind, wire, mb=1.0))
        for step in range(5):
            if new_buckets and step == 3:
                bucketing = engine(model).bucketing
                bucketing.use(dataclasses.replace(bucketing.fusion, bucket_bytes=5000))
            optimizer.zero_grad()
            model(given(step, world.rank)).backward()
            optimizer.step()
        return weights(model), residuals_of(model)

    results = on(SIZE, body)
    wanted = [torch.zeros(shape, dtype=torch.float64) for shape in Pull.SHAPES]
    for step in range(5):
        for rank in range(SIZE):
            for total, pull_ in zip(wanted, given(step, rank), strict=True):
                if pull_ is not None:
                    total += pull_.double() / SIZE
    for (name, value), want in zip(results[0][0].items(), wanted, strict=True):
        total = -value.double() + sum(residual[name].double() for _, residual in results)
        torch.testing.assert_close(total, want, rtol=1e-4, atol=1e-4, msg=name)


@pairs([*PULLED, ENDING])
def test_rebucketing_loses_nothing(kind, wire) -> None:
    sizes = random.Random(3).choices([400, 5000, 60_000, 1 << 20], k=8)
    assert len(set(sizes)) > 2

    def body(world: Any) -> Any:
        model, optimizer = distributed_pull(world, strategy(kind, wire))
        for step, nbytes in enumerate(sizes):
            bucketing = engine(model).bucketing
            bucketing.use(
                dataclasses.replace(bucketing.fusion, bucket_bytes=nbytes, first_bytes=nbytes // 4)
            )
            pull(model, optimizer, [step], world.rank)
        model.synchronize()
        return weights(model), residuals_of(model)

    assert_nothing_lost(on(SIZE, body), len(sizes), SIZE)


@pytest.mark.parametrize("after", slow_except([2, 5], [1, 2, 5]))
@pairs([*LOSSY[1:3], GROUPED])
def test_another_number_of_workers_loads_all_residuals(kind, wire, after) -> None:

    def before(world: Any) -> Any:
        model, optimizer = distributed_pull(world, strategy(kind, wire))
        pull(model, optimizer, range(4), world.rank)
        return weights(model), optimizer.residual_state_dict()

    saved = on(SIZE, before)
    parts = [state for _, state in saved]

    def resumed(world: Any) -> Any:
        model, optimizer = distributed_pull(world, strategy(kind, wire))
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(saved[0][0][name])
        optimizer.load_residuals(parts)
        assert engine(model).compression._step == 3
        pull(model, optimizer, [4], world.rank)
        return weights(model), residuals_of(model)

    results = on(after, resumed)
    moved = results[0][0]
    wanted = mean_pulled(4, SIZE)
    for i, each in enumerate(
        [sum(pulls(4, r)[j].double() for r in range(after)) / after for j in range(5)]
    ):
        wanted[i] += each
    for (name, value), want in zip(moved.items(), wanted, strict=True):
        total = -value.double() + sum(residual[name].double() for _, residual in results)
        torch.testing.assert_close(total, want, rtol=1e-4, atol=1e-4)


def test_a_checkpoint_of_each_worker_continues_bit_for_bit() -> None:
    wire = TopK(density=0.05, warmup=6, auto_disable=False)

    def straight(world: Any) -> Any:
        model, optimizer = distributed_pull(world, strategy("dear", wire))
        pull(model, optimizer, range(7), world.rank)
        return weights(model), residuals_of(model)

    def with_a_break(world: Any) -> Any:
        model, optimizer = distributed_pull(world, strategy("dear", wire))
        pull(model, optimizer, range(3), world.rank)
        state, values = optimizer.state_dict(), model.state_dict()
        values = {k: v.clone() for k, v in values.items()}
        wingbeat.release(model, optimizer)
        model, optimizer = distributed_pull(world, strategy("dear", wire, mb=1.0))
        model.load_state_dict(values)
        optimizer.load_state_dict(state)
        for each in residuals_of(model).values():
            assert bool(each.isfinite().all())
        pull(model, optimizer, range(3, 7), world.rank)
        return weights(model), residuals_of(model)

    # Other buckets after the break, so that other values are chosen; the sums are the same.
    assert_nothing_lost(on(SIZE, straight), 7, SIZE)
    assert_nothing_lost(on(SIZE, with_a_break), 7, SIZE)


def test_rank_0s_state_loads_on_all_and_into_a_plain_optimizer() -> None:
    wire = Sketch(bits=2, auto_disable=False)

    def body(world: Any) -> Any:
        model, optimizer = distributed_pull(world, strategy("allreduce", wire))
        pull(model, optimizer, range(2), world.rank)
        answers = {"mine": optimizer.state_dict()}
        zero = next(v for v in _gathered(world, answers["mine"]) if v["wingbeat"]["rank"] == 0)
        optimizer.load_state_dict(zero)
        torch.optim.SGD(model.parameters(), lr=1.0).load_state_dict(zero)
        return residuals_of(model)

    residuals = on(SIZE, body)
    assert any(bool(v.any()) for v in residuals[0].values())
    assert not any(bool(v.any()) for v in residuals[1].values())


_board: dict[Any, Any] = {}


def _gathered(world: Any, state: Any) -> list[Any]:
    """All ranks' states; threads of one process can simply show them to each other."""
    _board[world.rank] = state
    world.exchange("shown", True)
    return list(_board.values())


@pairs(ALWAYS, slow=("dear", "geryon-start", "geryon-dense"))
def test_training_ends_near_where_dense_training_does(kind, wire) -> None:
    def body(world: Any, chosen: Any, kind: str = kind) -> Any:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wingbeat.distribute(model, optimizer, strategy(kind, chosen), world=world)
        train(model, optimizer, range(60))
        probe = torch.randn(64, 6, generator=torch.Generator().manual_seed(5))
        model.eval()
        return weights(model), model(probe).square().mean().item()

    fp32 = on(SIZE, lambda world: body(world, "fp32", kind.removesuffix("-dense")))
    dense = fp32[0][1]
    results = on(SIZE, lambda world: body(world, wire))
    for other, _ in results[1:]:
        assert_same(other, results[0][0])
    start = 0.5
    assert results[0][1] < dense + 0.1 * start, (results[0][1], dense)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_that_no_worker_uses_do_not_change(kind) -> None:
    """Who has used a parameter travels unrounded."""

    def body(world: Any) -> Any:
        model = net()
        before = weights(model)
        optimizer = sgd(model.parameters())  # momentum and weight decay would move them
        how = strategy(kind, Sketch(bits=1, auto_disable=False), mb=1.0)
        wingbeat.distribute(model, optimizer, how, world=world)
        for step in range(4):
            model.use_spare = step == 2 and world.rank == 1
            train(model, optimizer, [step])
            if step < 2:
                assert torch.equal(weights(model)["spare.weight"], before["spare.weight"])
        return weights(model), before

    (after, before), *others = on(SIZE, body)
    assert not torch.equal(after["spare.weight"], before["spare.weight"])
    for other, _ in others:
        assert_same(other, after)


def test_momentum_correction_at_full_density_is_momentum() -> None:
    def body(world: Any, wire: Any, momentum: float) -> Any:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        wingbeat.distribute(model, optimizer, wingbeat.AllReduce(compression=wire), world=world)
        train(model, optimizer, range(3))
        return weights(model)

    # What was sent leaves no momentum behind (Deep Gradient Compression, section 3.2).
    corrected = on(2, lambda w: body(w, TopK(density=1.0, momentum=0.9, auto_disable=False), 0.0))[
        0
    ]
    plain = on(2, lambda w: body(w, "fp32", 0.0))[0]
    assert_same(corrected, plain, 1e-5)


def test_while_the_codec_is_off_momentum_correction_is_momentum() -> None:
    wire = TopK(density=0.01, warmup=0, momentum=0.9)

    def body(world: Any, chosen: Any, momentum: float) -> Any:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        wingbeat.distribute(model, optimizer, wingbeat.AllReduce(compression=chosen), world=world)
        if chosen is wire:
            engine(model).compression.on = False
        train(model, optimizer, range(2))
        return weights(model)

    off = on(2, lambda w: body(w, wire, 0.0))[0]
    assert_same(off, on(2, lambda w: body(w, "fp32", 0.9))[0], 1e-5)


def test_one_worker_alone_applies_momentum_correction() -> None:
    def body(world: Any, wire: Any, momentum: float) -> Any:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        wingbeat.distribute(model, optimizer, wingbeat.AllReduce(compression=wire), world=world)
        train(model, optimizer, range(3))
        return weights(model)

    corrected = on(1, lambda w: body(w, TopK(momentum=0.9, warmup=0), 0.0))[0]
    assert_same(corrected, on(1, lambda w: body(w, "fp32", 0.9))[0], 1e-6)


@pairs(ALWAYS, slow=("geryon-start", "geryon-dense"))
def test_a_scaler_sees_what_overflowed_and_training_goes_on(kind, wire) -> None:
    def body(world: Any) -> Any:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wingbeat.distribute(model, optimizer, strategy(kind, wire), world=world)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
        seen = []
        for step in range(4):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 6)).square().mean()
            if step == 1 and world.rank == 1:
                loss = loss * torch.inf
            before = weights(model)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            seen.append(all(map(torch.equal, before.values(), weights(model).values())))
        assert seen == [False, True, False, False]
        assert scaler.get_scale() == 2.0**9
        return weights(model)

    first, *others = on(SIZE, body)
    assert all(bool(v.isfinite().all()) for v in first.values())
    for other in others:
        assert_same(other, first)


@pytest.mark.parametrize("wire", ALWAYS, ids=repr)
def test_dear_clips_reduced_blocks(wire) -> None:
    def body(world: Any) -> Any:
        model, optimizer = distributed_pull(world, strategy("dear", wire))
        optimizer.zero_grad()
        model(pulls(0, world.rank)).backward()
        norm = optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        return float(norm), weights(model)

    first, *others = on(SIZE, body)
    for other in others:
        assert other[0] == first[0]
        assert_same(other[1], first[1])
    total = torch.cat([v.flatten() for v in first[1].values()]).norm()
    assert 0.2 < total < 1.05


def test_shards_use_sketched_gradients_and_dense_parameters() -> None:
    def body(world: Any) -> Any:
        how = wingbeat.DeAR(
            plan="fixed", mb=0.02, shard_optimizer=True, compression=Sketch(auto_disable=False)
        )
        model, optimizer = distributed_pull(world, how)
        pull(model, optimizer, range(4), world.rank)
        return weights(model)

    first, *others = on(SIZE, body)
    for other in others:
        assert_same(other, first)
    for value, wanted in zip(first.values(), mean_pulled(4, SIZE), strict=True):
        assert (value.double() + wanted).norm() < 0.05 * wanted.norm() + 1e-3


@pytest.mark.parametrize("kind", ["dear", "geryon", "geryon-start"])
def test_a_codec_that_is_not_faster_is_switched_off_on_all_workers(kind, caplog) -> None:
    """Virtual time: an iteration with the codec takes twice as long on one of the workers."""
    caplog.set_level("INFO", "wingbeat")

    def body(world: Any) -> Any:
        model, optimizer = distributed_pull(world, strategy(kind, Sketch()))
        compression, control = engine(model).compression, engine(model).control

        class Watch:
            def lap(self) -> float:
                return 2.0 if compression.on and world.rank == 1 else 1.0

            def restart(self) -> None:
                pass

        control._timer = Watch()
        steps = 0
        while control.deciding():
            pull(model, optimizer, [steps], world.rank)
            steps += 1
            assert steps < 40
        pull(model, optimizer, [steps, steps + 1], world.rank)
        return weights(model), residuals_of(model), compression.on, steps

    results = on(SIZE, body)
    assert [on for *_, on, _ in results] == [False] * SIZE
    assert len({steps for *_, steps in results}) == 1
    assert_nothing_lost([(w, d) for w, d, *_ in results], results[0][3] + 2, SIZE)
    assert not any(bool(v.any()) for v in results[0][1].values()), "no residual is left in the end"
    assert "is not faster here and is switched off" in caplog.text


def test_wires_that_cannot_work_are_refused() -> None:
    correcting = TopK(momentum=0.9, warmup=0)

    def dear(world: Any) -> None:
        with pytest.raises(
            UsageError, match=r"momentum=0.9.* needs whole all-reduces, .* which AllReduce has"
        ):
            distributed_pull(world, wingbeat.DeAR(compression=correcting))
        model = net()
        with pytest.raises(UsageError, match=r"SGD, group 0\) has momentum of its own"):
            wingbeat.distribute(
                model,
                sgd(model.parameters()),
                wingbeat.AllReduce(compression=correcting),
                world=world,
            )
        model, optimizer = distributed_pull(world, wingbeat.AllReduce())
        with pytest.raises(UsageError, match="keeps no residuals"):
            optimizer.residual_state_dict()

    on(1, dear)

    def differing(world: Any) -> None:
        with pytest.raises(MismatchError, match="must use the same strategy"):
            distributed_pull(world, wingbeat.AllReduce(compression=Sketch(bits=2 + world.rank)))

    on(2, differing)


def test_shards_add_the_residual_of_their_own_block() -> None:
    """Nothing encodes a reduced block a second time when parameters are what is gathered."""

    def body(world: Any) -> Any:
        how = wingbeat.DeAR(
            plan="fixed", mb=0.02, shard_optimizer=True, compression=Sketch(auto_disable=False)
        )
        model, optimizer = distributed_pull(world, how)
        part = optimizer.residual_state_dict()
        part["residuals"] = {name: torch.ones_like(v) for name, v in part["residuals"].items()}
        optimizer.load_residuals([{**part, "rank": rank} for rank in range(SIZE)])
        for _ in range(2):
            optimizer.zero_grad()
            model([torch.zeros(shape) for shape in Pull.SHAPES]).backward()
            optimizer.step()
        return weights(model), residuals_of(model)

    results = on(SIZE, body)
    for name, value in results[0][0].items():
        residuals = [residual[name] for _, residual in results]
        total = -value + sum(residuals)
        torch.testing.assert_close(total, torch.full_like(value, float(SIZE)), msg=name)
        assert all(bool((residual.abs() < 0.02).all()) for residual in residuals), "1 was missing"


def test_loading_shards_leaves_loaded_residuals_alone() -> None:
    def body(world: Any) -> Any:
        how = wingbeat.DeAR(
            plan="fixed", mb=0.02, shard_optimizer=True, compression=Sketch(auto_disable=False)
        )
        model, optimizer = distributed_pull(world, how)
        pull(model, optimizer, range(2), world.rank)
        before, shards = residuals_of(model), _gathered(world, optimizer.shard_state_dict())
        optimizer.load_shards(shards)
        assert_same(residuals_of(model), before)
        return any(bool(v.any()) for v in before.values())

    assert any(on(SIZE, body))


def test_a_residual_keeps_the_rounding_error_of_half_precision() -> None:
    """With the codec off, a residual too small for the gradients' dtype is not rounded away."""

    def body(world: Any) -> Any:
        model = nn.Linear(64, 64, bias=False).to(torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        wingbeat.distribute(model, optimizer, wingbeat.AllReduce(compression=Sketch()), world=world)
        control = engine(model).control
        part = optimizer.residual_state_dict()
        part["residuals"] = {"weight": torch.full((64, 64), 1e-3)}
        optimizer.load_residuals([{**part, "rank": rank} for rank in range(2)])
        control.trial.decide(False)
        model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
        return model.weight.grad.float().clone(), residuals_of(model)["weight"]

    (grad, _), *_ = results = on(2, body)
    total = grad + sum(residual for _, residual in results)
    torch.testing.assert_close(total, torch.full((64, 64), 1.002), rtol=0, atol=1e-5)


@pytest.mark.parametrize("on_", [True, False])
def test_velocity_waits_while_a_parameter_is_not_used(on_) -> None:
    wire = TopK(density=0.01, warmup=0, momentum=0.9)

    def body(world: Any) -> Any:
        model, optimizer = distributed_pull(world, wingbeat.AllReduce(compression=wire))
        engine(model).control.trial.decide(on_)
        pull(model, optimizer, [0], world.rank)
        before = engine(model).compression.state_dict()
        for step in (1, 2):
            optimizer.zero_grad()
            model([None, *pulls(step, world.rank)[1:]]).backward()
            optimizer.step()
        after = engine(model).compression.state_dict()
        return [(s["residuals"]["parts.0"], s["velocity"]["parts.0"]) for s in (before, after)]

    for before, after in on(2, body):
        assert_same(after, before)
        assert before[1].any()


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (5, "not made by state_dict"),
        ({"rank": None, "world_size": 7}, "not made by state_dict"),
        ({"step": "x"}, "is no number of steps"),
    ],
)
def test_a_damaged_state_changes_nothing(state, why) -> None:
    def body(world: Any) -> None:
        model, optimizer = distributed_pull(
            world, strategy("allreduce", Sketch(auto_disable=False))
        )
        pull(model, optimizer, range(2), world.rank)
        good, before = optimizer.state_dict(), residuals_of(model)
        broken = (
            {**good["wingbeat"], **state} if isinstance(state, dict) and "step" in state else state
        )
        with pytest.raises(UsageError, match=why):
            optimizer.load_state_dict({**good, "wingbeat": broken})
        with pytest.raises(ValueError, match="parameter group"):
            optimizer.load_state_dict({**good, "param_groups": []})
        with pytest.raises(UsageError, match=r"load_residuals\(int\): pass a list"):
            optimizer.load_residuals(5)
        assert_same(residuals_of(model), before)

    on(2, body)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_state_of_all_workers_loads_into_any_number(size: int) -> None:
    """As a trainer saves it that keeps one state for all."""

    def save(world: Any) -> Any:
        model, optimizer = distributed_pull(
            world, strategy("allreduce", Sketch(bits=2, auto_disable=False))
        )
        pull(model, optimizer, range(3), world.rank)
        return optimizer.state_dict()

    states = on(2, save)
    parts = [state["wingbeat"] for state in states]
    whole = {**states[0], "wingbeat": {"parts": parts}}

    def load(world: Any) -> Any:
        model, optimizer = distributed_pull(
            world, strategy("allreduce", Sketch(bits=2, auto_disable=False))
        )
        for broken in (5, [], parts[:1], [*parts, parts[0]], [parts[0], {}]):
            before = residuals_of(model) if world.size > 1 else None
            if world.size > 1:
                with pytest.raises(UsageError, match=r"^load_state_dict"):
                    optimizer.load_state_dict({**whole, "wingbeat": {"parts": broken}})
                assert_same(residuals_of(model), before)
        optimizer.load_state_dict(whole)
        return optimizer.residual_state_dict()["residuals"] if world.size > 1 else None

    loaded = on(size, load)
    if size > 1:
        for name in parts[0]["residuals"]:
            total = sum(part["residuals"][name] for part in parts)
            torch.testing.assert_close(sum(each[name] for each in loaded), total)
            assert total.any()


class _Watched:
    """A handle that notes when it has been waited for."""

    def __init__(self, handle: Any, calls: list[str]) -> None:
        self._handle, self._calls, self.jobs = handle, calls, handle.jobs

    def wait(self) -> None:
        self._handle.wait()
        self._calls.append("wait")


def test_residuals_are_not_read_while_a_codec_writes_them() -> None:
    """Gradients that were dropped are on the links still, and are encoded there once more."""

    def body(world: Any) -> tuple[list[str], int]:
        model, optimizer = distributed_pull(world, strategy("dear", Sketch(auto_disable=False)))
        behind = engine(model)
        calls: list[str] = []
        gather = behind.collectives.all_gather
        behind.collectives.all_gather = lambda *a, **k: _Watched(gather(*a, **k), calls)
        model(pulls(0, world.rank)).backward()
        optimizer.zero_grad()
        assert not calls
        optimizer.residual_state_dict()
        return calls, len(behind.buckets)

    for calls, buckets in on(2, body):
        assert calls == ["wait"] * buckets


def test_a_state_without_residuals_resets_them() -> None:
    def body(world: Any) -> dict[str, torch.Tensor]:
        model, optimizer = distributed_pull(
            world, strategy("allreduce", Sketch(auto_disable=False))
        )
        pull(model, optimizer, range(2), world.rank)
        assert any(bool(each.any()) for each in residuals_of(model).values())
        optimizer.load_state_dict(torch.optim.SGD(Pull().parameters(), lr=1.0).state_dict())
        return residuals_of(model)

    for residuals in on(2, body):
        assert not any(bool(each.any()) for each in residuals.values())


@pytest.mark.parametrize(("size", "worker"), [(1, "rank"), (2, "replica")])
def test_residuals_of_a_column_are_those_of_replicas(size: int, worker: str) -> None:
    world = columns(2, size)[-1]
    made = Compression(Sketch(auto_disable=False), [], Collectives(world))
    assert made.residuals is not None
    assert (made.residuals.worker, made.residuals.rank) == (worker, 1)
    world.close()
