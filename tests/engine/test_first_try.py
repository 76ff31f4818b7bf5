"""Top-k as it is learns in a first try; with the paper's settings a short training does not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import wingbeat
import wingbeat_lab
from wingbeat.transport import loopback
from wingbeat_lab.bench import models

WORKERS, STEPS = 2, 90


def accuracy(strategy: Any) -> float:
    """Share of right answers after a short training on scikit-learn's digits, in %."""
    pytest.importorskip("sklearn")
    images, answers, *held_out = models.data()
    network = models.network(0)  # before there are threads, which share the generator

    def body(world: Any) -> float:
        model = copy.deepcopy(network)
        sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        model, sgd = wingbeat.distribute(model, sgd, strategy, world=world)
        batches = models.batches(images, answers, rank=world.rank, workers=WORKERS, seed=0)
        for _ in range(STEPS):
            x, y = next(batches)
            sgd.zero_grad()
            cross_entropy(model(x), y).backward()
            sgd.step()
        return 100 * models.accuracy(model, *held_out)

    found = loopback.run(loopback.worlds(WORKERS), body)
    assert found == [found[0]] * WORKERS
    return found[0]


def test_a_first_try_learns_as_dense_training_does() -> None:
    dense = accuracy(wingbeat.AllReduce())
    assert dense > 90
    assert accuracy(wingbeat_lab.TopKSGD()) > dense - 4
    # What the defaults are for: 0.001 from the first step on, as the paper has it.
    assert accuracy(wingbeat_lab.TopKSGD(density=0.001, warmup=0)) < dense - 10
