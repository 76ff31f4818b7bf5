"""DiLoCo over groups of some: shared models come together, and it learns."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wingbeat
from helpers.training import assert_same, engine, net, on, train, weights
from wingbeat import parts
from wingbeat_lab.bench import models

SIZE = 4


def over(policy: str, every: int = 1) -> wingbeat.Strategy:
    return wingbeat.Strategy(
        plan="one",
        exchange=parts.Groups(policy=policy, size=2, encrypted=False),
        schedule=parts.Local(every=every),
        update=parts.Outer(),
    )


def flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def test_shared_models_converge_and_their_mean_is_unchanged() -> None:
    """Nobody moves a model of its own: only averages do, of groups that are known beforehand."""

    def body(world: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        wingbeat.distribute(model, optimizer, over("static"), world=world)
        with torch.no_grad():
            for param in model.parameters():
                param.add_(float(world.rank))
        begun = flat(model.parameters())
        train(model, optimizer, [0] * 30)
        ended = flat(engine(model).runtime.update.tensors()["shared"].values())
        wingbeat.synchronize(model)
        return begun, ended, weights(model)

    found = on(SIZE, body, timeout=60)
    begun, ended = (torch.stack([each[i] for each in found]) for i in (0, 1))
    torch.testing.assert_close(ended.mean(0), begun.mean(0), rtol=1e-4, atol=1e-4)
    assert ended.std(0).max() < 0.05 * begun.std(0).max()
    for each in found:
        assert_same(each[2], found[0][2])


@pytest.mark.slow
def test_groups_learn_digits_as_well_as_one_group_of_all() -> None:
    """Of groups that are known beforehand, so that the same numbers come each time."""
    images, names, more_images, more_names = models.data()
    first = models.network(1)

    def body(world: Any, policy: str) -> float:
        model = copy.deepcopy(first)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        wingbeat.distribute(model, optimizer, over(policy, every=8), world=world)
        batches = models.batches(images, names, rank=world.rank, workers=SIZE, seed=1)
        for _ in range(96):
            x, y = next(batches)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        wingbeat.synchronize(model)
        return models.accuracy(model, more_images, more_names)

    right = {p: on(SIZE, lambda w, p=p: body(w, p), timeout=60)[0] for p in ("all", "static")}
    assert right["all"] > 0.85
    assert right["static"] > right["all"] - 0.03
