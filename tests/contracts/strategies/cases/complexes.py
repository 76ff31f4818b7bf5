"""Complex parameters, as Fourier neural operators have them, next to real ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import wingbeat
import wingbeat_lab
from wingbeat.errors import UsageError

from ..compare import assert_same_on_every_rank
from ..models import adamw, cross_entropy, sgd, train
from ..registry import BOTH, LARGE, MEASURED, Grid, Rig, check, scenario
from ..sides import Side, bring_world_up

WHOLE = Grid(strategies=(*BOTH, *MEASURED))
"""Strategies under which gradients are added, and whole on each worker."""


class Spectral(nn.Module):
    """A filter in the frequency domain between layers; one complex number more than is even."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(8, 12)
        self.filter = nn.Parameter(torch.randn(7, dtype=torch.complex64) / 3)
        self.mix = nn.Parameter(torch.randn(3, 7, dtype=torch.complex64) / 3)
        self.turn = nn.Parameter(torch.tensor(0.3 + 0.2j))
        self.late = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
        self.head = nn.Linear(12, 3)
        self.register_buffer("phase", torch.ones(7, dtype=torch.complex64))

    def forward(self, x: Tensor, late: bool = False) -> Tensor:
        modes = torch.fft.rfft(torch.tanh(self.lift(x))) * self.filter * self.phase
        out = self.head(torch.fft.irfft(modes, n=12)) + (self.turn * (modes @ self.mix.mT)).real
        return out * (1 + self.late.real.sum() - self.late.imag[0]) if late else out


@scenario(WHOLE)
def complex_parameters_sgd(side: Side) -> None:
    model = Spectral()
    train(side, *side.setup(model, sgd(model)))


@scenario(WHOLE)
def complex_parameters_clipped_adamw(side: Side) -> None:
    model = Spectral()
    model, optimizer = side.setup(model, adamw(model))
    for step in range(6):
        optimizer.zero_grad()
        cross_entropy(model, *side.batch(step)).backward()
        side.note("total norm", float(side.clip(model, optimizer, 0.5)))
        side.note("gradient", side.bare(model).filter.grad)
        optimizer.step()


@scenario(WHOLE)
def complex_parameters_clipped_by_the_largest(side: Side) -> None:
    model = Spectral()
    model, optimizer = side.setup(model, sgd(model))
    for step in range(6):
        optimizer.zero_grad()
        cross_entropy(model, *side.batch(step)).backward()
        total = side.clip(model, optimizer, 0.05, float("inf"))
        side.note("total norm", float(total))
        optimizer.step()


@scenario(WHOLE)
def complex_parameters_accumulated_and_unused_on_some_ranks(side: Side) -> None:
    model = Spectral()
    model, optimizer = side.setup(model, adamw(model))
    for step in range(4):
        optimizer.zero_grad()
        for micro in range(2):
            x, y = side.batch(2 * step + micro)
            late = step > 1 and side.rank == 0
            with side.no_sync(model) if micro == 0 else torch.enable_grad():
                nn.functional.cross_entropy(model(x, late), y).backward()
        optimizer.step()


@scenario(WHOLE, state_of="last")
def complex_parameters_join(side: Side) -> None:
    model = Spectral()
    model, optimizer = side.setup(model, adamw(model))
    with side.join(model):
        train(side, model, optimizer, range(3 + side.rank))


@check(Grid(worlds=(2,), strategies=("allreduce-coded", "dear-sharded", "geryon"), mbs=(LARGE,)))
def complex_parameters_where_they_cannot_be(rig: Rig) -> None:
    bring_world_up()
    model = Spectral()
    with pytest.raises(UsageError, match=r"'filter' is complex.*use wingbeat.AllReduce\(\)"):
        wingbeat.distribute(model, adamw(model), rig.strategy)
    assert type(model) is Spectral


@check(Grid(worlds=(2,), strategies=("allreduce",), mbs=(LARGE,)))
def complex_parameters_through_wires_of_16_bits(rig: Rig) -> None:
    """A cast rounds numbers one by one; fp16 has a scale for each parameter."""
    bring_world_up()
    model = Spectral()
    with pytest.raises(UsageError, match=r"Half\(\).*with or without compression=\"bf16\""):
        wingbeat.distribute(model, sgd(model), wingbeat.AllReduce(compression="fp16"))
    optimizer = sgd(model)
    wingbeat.distribute(model, optimizer, wingbeat.AllReduce(compression="bf16"))
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.full((2, 8), 0.1 * (rig.rank + 1))).square().mean().backward()
        optimizer.step()
    wingbeat.release(model, optimizer)
    assert_same_on_every_rank(model.state_dict(), "through bf16")


@check(Grid(worlds=(2,), strategies=("allreduce",), mbs=(LARGE,)))
def complex_parameters_where_models_or_gradients_differ(rig: Rig) -> None:
    bring_world_up()
    for strategy in (
        wingbeat_lab.Ako(),
        wingbeat.Canary(),
        wingbeat.LocalSGD(),
        wingbeat.Ripples(),
        wingbeat.DiLoCo(),
        wingbeat.Geryon(update="server"),
    ):
        model = Spectral()
        with pytest.raises(UsageError, match="'filter' is complex"):
            wingbeat.distribute(model, sgd(model), strategy)
