"""On real data a training with Ako ends about where one with all-reduces does."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch

import wingbeat
import wingbeat_lab
from helpers.training import on
from wingbeat_lab.bench import models

SIZE, STEPS = 4, 240


def accuracies(strategy: Any) -> list[float]:
    """Each worker's share of test images that it names right."""
    images, answers, test_images, test_answers = models.data()
    start = models.network(0).state_dict()

    def body(world: Any) -> float:
        model = models.network(0)
        model.load_state_dict(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        model, optimizer = wingbeat.distribute(model, optimizer, strategy, world=world)
        own = models.batches(images, answers, rank=world.rank, workers=SIZE, seed=1)
        for _, (x, y) in zip(range(STEPS), own, strict=False):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        return models.accuracy(model, test_images, test_answers)

    return on(SIZE, body, timeout=60.0)


@pytest.mark.slow
def test_the_digits_are_learnt_as_well() -> None:
    usual, found = accuracies(wingbeat.AllReduce()), accuracies(wingbeat_lab.Ako())
    assert len(set(usual)) == 1
    assert usual[0] > 0.96
    assert statistics.mean(found) > usual[0] - 0.015
    assert min(found) > usual[0] - 0.025
