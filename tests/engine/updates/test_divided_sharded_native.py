"""The path that GPUs take, on CPUs: whole collectives of a torch.distributed group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import wingbeat
from helpers.pool import Pool
from helpers.training import assert_same, distributed, engine, state_of, train, weights
from wingbeat.errors import UsageError
from wingbeat.transport.nccl import NcclGroup
from wingbeat.types import Fusion


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    made = Pool(3)
    yield made
    made.close()


def _trained(native: bool, **options: Any) -> Any:
    world = wingbeat.init(timeout=20)
    if native:
        world.make_nccl_group = lambda _: NcclGroup(None, world.rank, world.size)
        world.nccl_devices = frozenset({"cpu"})
    model, optimizer = distributed(world, **options)
    train(model, optimizer, range(3))
    engine(model).bucketing.use(Fusion(kind="layers", layers=3))
    train(model, optimizer, range(3, 6))
    optimizer.load_state_dict(state_of(optimizer))
    train(model, optimizer, range(6, 8))
    result = weights(model), state_of(optimizer)
    wingbeat.release(model, optimizer)
    wingbeat.shutdown()
    return result


def _adafactor(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(params, lr=0.1)


def trains_the_same_by_whole_parameters() -> None:
    want = _trained(False, make=_adafactor, shard_optimizer=False)
    assert_same(_trained(True, make=_adafactor), want, 1e-5)
    _trained(True, make=_adafactor, compression="bf16")
    with pytest.raises(UsageError, match="Adafactor is divided by whole parameters, and codecs"):
        _trained(True, make=_adafactor, compression="sketch@4")
    wingbeat.shutdown()


def trains_the_same() -> None:
    torch.manual_seed(0)
    want = _trained(False, shard_optimizer=False)
    assert_same(_trained(True), want, 1e-5)
    for wire in ("bf16", "fp16"):
        assert_same(_trained(True, compression=wire), want, 5e-2)


@pytest.mark.slow
def test_sharded_training_ends_the_same_as_over_steps(pool: Pool) -> None:
    pool.run(trains_the_same)


@pytest.mark.slow
def test_whole_parameters_end_the_same_as_over_steps(pool: Pool) -> None:
    pool.run(trains_the_same_by_whole_parameters)
