"""What every library trains in ``trainers.py``: a small transformer, its batches, its optimizer."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import wingbeat

WORDS = 512
LENGTH = 32


class Transformer(nn.Module):
    """Predicts the next of 512 words; real computation of about 2 FLOP a parameter and word.

    With ``labels`` it returns the loss and the logits, as the models of the HF Trainer do, else the
    logits alone.
    """

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.places = nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, nhead=4, dim_feedforward=4 * width, dropout=0.0, batch_first=True
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, WORDS)

    def forward(self, words: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        hidden = self.words(words) + self.places
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(hidden)
        return logits if labels is None else (loss_of(logits, labels), logits)


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy; ``labels`` are of shape (batch, LENGTH)."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Task:
    """One worker's share of a training.

    Attributes:
        rank: this worker.
        size: how many workers there are.
        iterations: how many are trained.
        mb: size of all strategies' buckets, DDP's too, in MB.
        ticks: when each iteration was over, in seconds of the monotonic clock.
    """

    def __init__(self, rank: int, size: int, options: dict[str, Any]) -> None:
        self.rank, self.size = rank, size
        self.iterations: int = options["iterations"]
        self.mb: float = options["mb"]
        self.batch: int = options["batch"]
        self._shape = options["width"], options["layers"]
        self.ticks: list[float] = []

    def model(self) -> Transformer:
        """Return the same untrained model on every worker."""
        torch.manual_seed(0)
        return Transformer(*self._shape)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return what all libraries train with."""
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def dataset(self) -> TensorDataset:
        """Return all workers' samples, ``(words, labels)``; as many as the iterations need."""
        count = self.iterations * self.size * self.batch
        made = torch.Generator().manual_seed(1)
        words = torch.randint(WORDS, (count, LENGTH + 1), generator=made)
        return TensorDataset(words[:, :-1].contiguous(), words[:, 1:].contiguous())

    def loader(self) -> DataLoader[Any]:
        """Return the samples in batches of ``self.batch``, for a library to divide by workers."""
        return DataLoader(self.dataset(), batch_size=self.batch)

    def strategy(self, name: str) -> Any:
        """Return wingbeat's strategy of that name, with buckets of the size that DDP has."""
        if name == "allreduce":
            return wingbeat.AllReduce(mb=self.mb)
        return wingbeat.DeAR(plan="fixed", mb=self.mb)

    @property
    def over(self) -> bool:
        """Whether all iterations have been made."""
        return len(self.ticks) >= self.iterations

    def tick(self) -> None:
        """Note that an iteration is over."""
        self.ticks.append(time.monotonic())

    def forward_seconds(self, times: int = 30) -> float:
        """Return the least time of a forward alone: what it takes where nothing disturbs it."""
        model, taken = self.model(), []
        words, labels = (each[: self.batch] for each in self.dataset().tensors)
        for _ in range(times):
            begin = time.monotonic()
            model(words, labels)
            taken.append(time.monotonic() - begin)
        return min(taken)
