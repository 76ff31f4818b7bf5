"""Colayers that change by measurements of the real engine."""

from __future__ import annotations

import logging
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import wingbeat
from helpers.training import engine, on, weights
from helpers.waiting import is_collected
from wingbeat.errors import UsageError
from wingbeat.methods.bounded_staleness.colayers import FIRST_ATTEMPT
from wingbeat.methods.bounded_staleness.simulated import bundled
from wingbeat_lab.paced import simulator_model
from wingbeat_lab.paced.model import Clock, PacedModel
from wingbeat_lab.paced.profile import load_profile

TIED: dict[str, Any] = {
    "s": 2,
    "p": None,
    "compression": "fp32",
    "encrypted": False,
    "measured": True,
}


def distributed(world: Any, model: nn.Module, **options: Any) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    strategy = wingbeat.Canary(**{**TIED, **options})
    return wingbeat.distribute(model, optimizer, strategy, world=world)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(n, m) for n, m in ((4, 64), (64, 256), (256, 64), (64, 4), (4, 1)))
    )


def iterate(model: Any, optimizer: Any, rank: int, step: int) -> None:
    rng = torch.Generator().manual_seed(100 * step + rank)
    optimizer.zero_grad()
    model(torch.randn(16, 4, generator=rng)).square().mean().backward()
    optimizer.step()


def buckets_of(model: Any) -> list[list[str]]:
    return [[slot.name for slot in bucket.slots] for bucket in engine(model).buckets]


@pytest.mark.parametrize("wire", ["fp32", "sketch"])
def test_colayer_change_leaves_workers_equal(wire: str) -> None:
    def worker(world: Any) -> Any:
        model, optimizer = distributed(world, net(), colayers=3, compression=wire)
        before = buckets_of(model)
        for step in range(FIRST_ATTEMPT + 6):
            iterate(model, optimizer, world.rank, step)
        model.synchronize()
        exchange = engine(model).runtime.exchange
        made = exchange.machine.epoch, exchange.machine.colayers, exchange.applied
        return before, buckets_of(model), made, weights(model)

    found = on(3, worker)
    for before, after, made, weight in found:
        assert (before, after) == found[0][:2]
        assert made[:2] == (1, 4)
        assert made[2] == pytest.approx(FIRST_ATTEMPT + 6, abs=0.1)
        assert all(torch.equal(weight[name], found[0][3][name]) for name in weight)


def test_colayer_change_keeps_residuals_of_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Residuals are equal bits in the new buckets."""

    def worker(world: Any) -> Any:
        model, optimizer = distributed(world, net(), colayers=3, compression="sketch")
        bundling = engine(model).bundling
        states, replan = [], bundling.rebucket

        def kept() -> dict[str, torch.Tensor]:
            return dict(optimizer.residual_state_dict()["residuals"])

        def recorded() -> None:
            states.append(kept())
            replan()
            states.append(kept())

        bundling.rebucket = recorded
        bundling.choose_colayers = lambda _: ((9, 8, 7, 6, 5), (4, 3), (2, 1, 0))
        for step in range(FIRST_ATTEMPT + 2):
            iterate(model, optimizer, world.rank, step)
        model.synchronize()
        return states, len(buckets_of(model))

    for (before, after), _ in on(2, worker):
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert any(value.any() for value in before.values())


def test_deleted_model_with_profiler_is_freed() -> None:
    def worker(world: Any) -> bool:
        model, optimizer = distributed(world, net(), colayers=3, s=None)
        for step in range(FIRST_ATTEMPT + 2):
            iterate(model, optimizer, world.rank, step)
        reference = weakref.ref(model[0].weight)
        del model, optimizer
        return is_collected(reference)

    assert on(2, worker) == [True, True]


class Virtual(threading.local):
    """A clock for each worker's thread, advanced by the time of each paced layer."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def spend(self, _clock: Clock, seconds: float) -> None:
        self.now += seconds


def test_measured_vgg19_colayers_equal_paper(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    virtual = Virtual()
    monkeypatch.setattr("wingbeat.planning.backward.time", virtual)
    monkeypatch.setattr(Clock, "spend", lambda clock, seconds: virtual.spend(clock, seconds))
    assert_the_papers(time_scale=1.0)


@pytest.mark.slow
def test_measured_vgg19_colayers_in_real_time_equal_paper() -> None:
    assert_the_papers(time_scale=8.0)  # the shortest layers take 0.5 and 2 ms


def assert_the_papers(time_scale: float) -> None:
    """Check that colayers are those of section 4.3.2 and of the simulator."""
    profile = load_profile("vgg19").scaled(0.02)

    def worker(world: Any) -> Any:
        model = PacedModel(profile, world.rank, time_scale=time_scale)
        model, optimizer = distributed(world, model, colayers=4)
        for _ in range(FIRST_ATTEMPT + 1):
            optimizer.zero_grad()
            model(None).backward()
            optimizer.step()
        model.synchronize()
        return buckets_of(model)

    first, second = on(2, worker)
    assert first == second
    assert [[name.rpartition(".")[0] for name in bucket[::2]] for bucket in first] == [
        ["classifier_6", "classifier_3", "classifier_0"],
        ["features_34", "features_32", "features_30", "features_28"],
        ["features_25", "features_23", "features_21", "features_19"],
        [f"features_{n}" for n in (16, 14, 12, 10, 7, 5, 2, 0)],
    ]
    simulated = bundled(simulator_model(profile), 4, measured=True)
    assert simulated.tensors == tuple(map(len, first))


def test_colayer_count_auto_adjusts_p() -> None:
    def worker(world: Any) -> Any:
        model, optimizer = distributed(world, net(), colayers="auto", p="auto")
        for step in range(FIRST_ATTEMPT + 2):
            iterate(model, optimizer, world.rank, step)
        model.synchronize()
        machine = engine(model).runtime.exchange.machine
        return len(buckets_of(model)), machine.colayers, machine.bound.p

    (k, colayers, p), other = on(2, worker)
    assert (k, colayers, p) == other
    assert 4 <= k <= 5  # of five layers
    assert (colayers, p) == (k + 1, max(1, k * 6 // 10))


def test_colayer_change_during_synchronize_includes_all() -> None:
    def worker(world: Any) -> Any:
        model, optimizer = distributed(world, net(), colayers=3)
        iterate(model, optimizer, world.rank, 0)
        for _ in range(4):
            model.synchronize()  # each call skips two iterations
        epoch = engine(model).runtime.exchange.machine.epoch
        for step in range(3):
            iterate(model, optimizer, world.rank, step)
        model.synchronize()
        return epoch, weights(model)

    (epoch, one), (_, other) = on(2, worker)
    assert epoch == 1
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_colayer_change_is_logged_by_one_worker(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="wingbeat")

    def worker(world: Any) -> None:
        model, optimizer = distributed(world, net(), colayers=3)
        for step in range(FIRST_ATTEMPT + 2):
            iterate(model, optimizer, world.rank, step)
        model.synchronize()

    on(2, worker)
    assert caplog.text.count("colayers, by what was measured") == 1


def test_colayers_are_kept_after_worker_finished(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="wingbeat")
    ended = threading.Event()

    def worker(world: Any) -> Any:
        model, optimizer = distributed(world, net(), colayers=3)
        exchange = engine(model).runtime.exchange
        before = buckets_of(model)
        for step in range(2 if world.rank else FIRST_ATTEMPT + 4):
            iterate(model, optimizer, world.rank, step)
        if world.rank:
            world.close()
            ended.set()
        else:
            assert ended.wait(30)
            model.synchronize()
        return before == buckets_of(model), exchange.machine.epoch

    assert on(2, worker)[0] == (True, 0)
    assert "colayers stay as they are: a worker has ended its training" in caplog.text


def test_invalid_measured_options_are_rejected() -> None:
    with pytest.raises(UsageError, match="gradients stay in their buckets"):
        wingbeat.Canary(s=0, measured=True)
    with pytest.raises(UsageError, match=r"colayers='auto'.*measured=True"):
        wingbeat.Canary(colayers="auto")
    with pytest.raises(UsageError, match=r"p=11.*1 to 10"):
        wingbeat.Canary(colayers="auto", measured=True, p=11)
    with pytest.raises(UsageError, match="needs sums in rounds"):
        wingbeat.Strategy(plan=wingbeat.parts.Colayers(measured=True))
    assert wingbeat.Canary(colayers="auto", measured=True, p=7).plan.fusion().least == 7
