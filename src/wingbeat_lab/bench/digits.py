"""A real model on real data: a small convolutional network on scikit-learn's digits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

BATCH = 32
"""Images in a worker's batch."""
TEST_IMAGES = 360
"""Images in the test set, of 1797."""


def network(seed: int) -> nn.Module:
    """A network of two convolutions and two linear layers; weights depend on the seed only."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images, their digits, test images, their digits; the same split on every worker."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.from_numpy((bunch.images / 16.0).astype(np.float32)).unsqueeze(1)
    digits = torch.from_numpy(bunch.target.astype(np.int64))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return images[train], digits[train], images[test], digits[test]


def batches(
    images: Tensor, digits: Tensor, *, rank: int, workers: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """This worker's batches, infinite: each epoch has a new order, split over workers.

    The order depends on ``seed`` and the epoch only, so every strategy gets the same batches.
    """
    generator = torch.Generator().manual_seed(seed)
    size = min(BATCH, len(images) // workers)
    while True:
        order = torch.randperm(len(images), generator=generator)
        per_worker = len(order) // workers
        own = order[rank::workers][:per_worker]
        for first in range(0, per_worker - size + 1, size):
            chosen = own[first : first + size]
            yield images[chosen], digits[chosen]


def accuracy(model: nn.Module, images: Tensor, digits: Tensor) -> float:
    """Share of ``images`` that ``model`` classifies correctly, 0 to 1."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        right = (model(images).argmax(dim=1) == digits).float().mean()
    model.train(was_training)
    return float(right)
