"""Modules of torch that use their parameters in their own ways."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from ..models import adamw, cross_entropy, sgd, train
from ..registry import Grid, scenario
from ..sides import Side


class Recurrent(nn.Module):
    """A two-layer recurrent net; its children's weights are never leaf modules' calls."""

    def __init__(self, cls: Any) -> None:
        super().__init__()
        self.cells = cls(4, 10, num_layers=2, batch_first=True)
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.cells(x.view(len(x), 2, 4))[0][:, -1])
        return out


@scenario()
def lstm(side: Side) -> None:
    model: Any = Recurrent(nn.LSTM)
    train(side, *side.setup(model, sgd(model)))


@scenario()
def gru(side: Side) -> None:
    model: Any = Recurrent(nn.GRU)
    train(side, *side.setup(model, adamw(model)))


class Attention(nn.Module):
    """A transformer encoder; its attention uses ``out_proj`` without calling it."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.view(-1, 2, 4).repeat(1, 1, 2)
        out: Tensor = self.head(self.encoder(tokens).mean(1))
        return out


@scenario(floor=1e-3)
def transformer(side: Side) -> None:
    model: Any = Attention(0.0)
    train(side, *side.setup(model, sgd(model)))


@scenario(floor=1e-3)
def transformer_evaluated_after_every_step(side: Side) -> None:
    """Evaluation takes torch's fast path, which calls none of the children."""
    model: Any = Attention(0.0)
    model, optimizer = side.setup(model, sgd(model))
    x, _ = side.batch(99)
    for step in range(4):
        train(side, model, optimizer, [step])
        model.eval()
        with torch.no_grad():
            side.note(f"output after {step}", model(x))
        model.train()


@scenario(floor=1e-3)
def transformer_with_dropout(side: Side) -> None:
    model: Any = Attention(0.2)
    model, optimizer = side.setup(model, sgd(model))
    for step in range(5):
        torch.manual_seed(10 * step + side.rank)
        train(side, model, optimizer, [step])


class Convolutions(nn.Module):
    """Convolution, batch norm and pooling over an 8-pixel image row."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6, momentum=momentum)
        self.second = nn.Conv2d(6, 8, 3, padding=1)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.first(x.view(-1, 1, 2, 4))))
        out: Tensor = self.head(torch.tanh(self.second(x)).mean((2, 3)))
        return out


@scenario()
def convolutions_in_channels_last(side: Side) -> None:
    model: Any = Convolutions().to(memory_format=torch.channels_last)
    train(side, *side.setup(model, sgd(model)))


@scenario(Grid(worlds=(2, 3, 4)))
def batch_norm(side: Side) -> None:
    model: Any = Convolutions()
    train(side, *side.setup(model, sgd(model)), range(8))


@scenario()
def batch_norm_with_cumulative_average(side: Side) -> None:
    model: Any = Convolutions(momentum=None)
    train(side, *side.setup(model, adamw(model)), range(5))


@scenario()
def batch_norm_with_accumulation(side: Side) -> None:
    model: Any = Convolutions()
    model, optimizer = side.setup(model, sgd(model))
    for step in range(0, 8, 2):
        optimizer.zero_grad()
        with side.no_sync(model):
            cross_entropy(model, *side.batch(step)).backward()
        cross_entropy(model, *side.batch(step + 1)).backward()
        optimizer.step()


@scenario()
def batch_norm_with_two_forwards_before_a_backward(side: Side) -> None:
    """As a GAN's critic has them; autograd must not take what rank 0 sends for a change."""
    model: Any = Convolutions()
    model, optimizer = side.setup(model, sgd(model))
    for step in range(0, 8, 2):
        optimizer.zero_grad()
        losses = [cross_entropy(model, *side.batch(step + each)) for each in range(2)]
        sum(losses).backward()  # type: ignore[union-attr]
        optimizer.step()


@scenario()
def batch_norm_evaluated_on_rank_zeros_statistics(side: Side) -> None:
    """DDP's other ranks keep their own statistics until the next forward; wingbeat's do not."""
    model: Any = Convolutions()
    model, optimizer = side.setup(model, sgd(model))
    x = torch.linspace(-1, 1, 32).view(4, 8)
    for step in range(4):
        train(side, model, optimizer, [step])
        model.eval()
        with torch.no_grad():
            out = model(x)
        model.train()
        side.note("output", _of_rank_zero(out) if not side.is_subject else out)


def _of_rank_zero(value: Tensor) -> Tensor:
    value = value.clone()
    torch.distributed.broadcast(value, 0)
    return value


@scenario()
def frozen_batch_norm(side: Side) -> None:
    model: Any = Convolutions()
    model.norm.eval()
    model.norm.weight.requires_grad_(False)
    train(side, *side.setup(model, sgd(model)))


@scenario()
def dropout(side: Side) -> None:
    model: Any = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.Tanh(), nn.Linear(32, 3))
    model, optimizer = side.setup(model, adamw(model))
    for step in range(6):
        torch.manual_seed(10 * step + side.rank)
        train(side, model, optimizer, [step])


@scenario()
def weight_norm(side: Side) -> None:
    model: Any = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(8, 16)), nn.Tanh(), nn.Linear(16, 3)
    )
    train(side, *side.setup(model, sgd(model)))


class Talkative(nn.Module):
    """Keyword arguments in, a dictionary with unused entries and constants out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.out = nn.ModuleDict({"a": nn.Linear(16, 3), "b": nn.Linear(16, 3)})

    def forward(self, *, x: Tensor, double: bool = False, mask: None = None) -> dict[str, Any]:
        h = torch.tanh(self.first(x)) * (2.0 if double else 1.0)
        return {"a": self.out["a"](h), "extra": (self.out["b"](h), 7, None), "step": 3}


@scenario()
def keyword_arguments_and_structured_outputs(side: Side) -> None:
    def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x=x, double=True)["a"], y)

    model: Any = Talkative()
    train(side, *side.setup(model, sgd(model)), loss_of=loss_of)


@scenario()
def structured_output_used_now_and_then(side: Side) -> None:
    model: Any = Talkative()
    model, optimizer = side.setup(model, adamw(model))
    for step in range(6):

        def loss_of(model: Any, x: Tensor, y: Tensor, step: int = step) -> Tensor:
            out = model(x=x)
            loss = F.cross_entropy(out["a"], y)
            if (step + side.rank) % 2:
                loss = loss + out["extra"][0].pow(2).mean()
            return loss

        train(side, model, optimizer, [step], loss_of)


@scenario()
def submodule_called_directly(side: Side) -> None:
    """Features of a part of the model, right after a step, without the model's own forward."""
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Sequential(nn.Linear(16, 3)))
    bare = model
    model, optimizer = side.setup(model, sgd(model))
    x, _ = side.batch(99)
    for step in range(4):
        train(side, model, optimizer, [step])
        with torch.no_grad():
            side.note(f"features after {step}", bare[0](x))
            side.note(f"head after {step}", bare[2](torch.ones(1, 16)))
