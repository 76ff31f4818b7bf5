"""The models of a bench: a paced model, or a small real one on real data."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wingbeat.errors import UsageError, unknown
from wingbeat_lab import paced
from wingbeat_lab.bench.contenders import Contender
from wingbeat_lab.layer_costs import LayerCosts

if TYPE_CHECKING:
    from torch import Tensor, nn


BATCH = 32
"""Images in a worker's batch."""
TEST_IMAGES = 360
"""Images in the test set, of 1797."""


def network(seed: int) -> nn.Module:
    """A network of two convolutions and two linear layers; weights depend on the seed only."""
    import torch
    from torch import nn

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
    import numpy as np
    import torch
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
    import torch

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
    import torch

    was_training = model.training
    model.eval()
    with torch.no_grad():
        right = (model(images).argmax(dim=1) == digits).float().mean()
    model.train(was_training)
    return float(right)


@dataclass(frozen=True, slots=True)
class BenchModel:
    """A model by name.

    Attributes:
        profile: the paced model's profile; None for ``digits``.
        stretch: factor on a paced model's times.
    """

    name: str
    profile: paced.Profile | None
    stretch: float = 1.0

    @property
    def link_scale(self) -> float:
        """Factor on the lab's rates that preserves the ratio of communication to computation."""
        return 1.0 if self.profile is None else self.profile.scale / self.stretch

    @property
    def codec_factor(self) -> float:
        """Factor on codec time: whole model over scaled model, at the bench's pace."""
        return 1.0 / self.link_scale

    def compute_s(self) -> tuple[float, float] | None:
        """Forward and backward seconds of an iteration; None for a real model."""
        if self.profile is None:
            return None
        factor = self.stretch / 1e3
        return self.profile.forward_ms * factor, self.profile.backward_ms * factor

    def layers(self, contender: Contender) -> list[LayerCosts] | None:
        """Each layer's seconds and encoded bytes under ``contender``; None for a real model."""
        if self.profile is None:
            return None
        factor = self.stretch / 1e3
        return [
            LayerCosts(
                layer.forward_ms * factor,
                layer.backward_ms * factor,
                contender.wire_bytes(
                    [p.shape for p in layer.parameters],
                    names=[f"{layer.attribute}.{p.name}" for p in layer.parameters],
                ),
            )
            for layer in self.profile.layers
        ]


def names() -> list[str]:
    """All valid names of models."""
    return ["digits", *(paced.profile.PREFIX + name for name in paced.names())]


def parse(text: str, *, stretch: float = 1.0) -> BenchModel:
    """Parse ``digits``, ``paced:NAME``, or the file of a profile; the last two with ``@SCALE``.

    UsageError for an unknown model, an invalid scale or stretch, and if ``digits`` has no data
    because scikit-learn is missing.
    """
    if not (math.isfinite(stretch) and 0.01 <= stretch <= 100.0):
        raise UsageError(f"stretch = {stretch:g}; allowed: 0.01 to 100")
    is_file = text.endswith(".json") or ".json@" in text
    if is_file and not text.startswith(paced.profile.PREFIX):
        text = paced.profile.PREFIX + text
    if text.startswith(paced.profile.PREFIX):
        return BenchModel(text, paced.parse(text), stretch)
    if text != "digits":
        raise unknown("model", text, names())
    if stretch != 1.0:
        raise UsageError(f"stretch = {stretch:g} with model 'digits'; only paced models stretch")
    if importlib.util.find_spec("sklearn") is None:
        raise UsageError(
            "model 'digits' needs scikit-learn; install it with: pip install 'wingbeat[bench]'"
        )
    return BenchModel(text, None)


@dataclass
class Built:
    """A model and its data inside a worker.

    Attributes:
        model: on the CPU, the same weights on every worker.
        loss: runs the wrapped model on the next batch and returns the loss to differentiate.
        accuracy: the wrapped model's accuracy on the test set, 0 to 1, or None.
    """

    model: nn.Module
    loss: Callable[[nn.Module], Tensor]
    accuracy: Callable[[nn.Module], float | None]


def build(spec: BenchModel, *, rank: int, workers: int, seed: int) -> Built:
    """Build the model and its data; they are the same for every row."""
    if spec.profile is not None:
        model = paced.PacedModel(spec.profile, rank=rank, time_scale=spec.stretch)
        return Built(model, lambda wrapped: _tensor(wrapped(None)), lambda _: None)
    return _build_digits(rank=rank, workers=workers, seed=seed)


def _build_digits(*, rank: int, workers: int, seed: int) -> Built:
    from torch.nn.functional import cross_entropy

    images, names_, test_images, test_names = data()
    stream: Iterator[Any] = batches(images, names_, rank=rank, workers=workers, seed=seed)

    def loss(wrapped: nn.Module) -> Tensor:
        batch, answers = next(stream)
        return cross_entropy(wrapped(batch), answers)

    return Built(
        network(seed),
        loss,
        lambda wrapped: accuracy(wrapped, test_images, test_names),
    )


def _tensor(value: Any) -> Tensor:
    """The model's loss; a wrapper's ``forward`` is untyped."""
    loss: Tensor = value
    return loss
