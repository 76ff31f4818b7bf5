"""What the tests of Lightning Fabric run in worker processes: each against Fabric's own DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from lightning.fabric.strategies import DDPStrategy
from torch import nn

import wingbeat
from integrations.lightning_cases import (
    EXACT,
    alike,
    close,
    line,
    loader,
    same_everywhere,
    torchrun,
)
from wingbeat.integrations.fabric import WingbeatStrategy

OPTIONS: dict[str, Any] = {"accelerator": "cpu", "devices": 2}


def network(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(8, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Linear(16, 16),
        nn.ReLU(),
        nn.Linear(16, 4),
    )


def made(strategy: Any, **options: Any) -> Any:
    fabric = Fabric(strategy=strategy, **{**OPTIONS, **options})
    fabric.launch()
    return fabric


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(fabric: Any, model: Any, optimizer: Any, clip: Any = None, every: int = 1) -> None:
    for number, (x, y) in enumerate(fabric.setup_dataloaders(loader())):
        last = (number + 1) % every == 0
        with fabric.no_backward_sync(model, enabled=not last):
            fabric.backward(nn.functional.mse_loss(model(x), y) / every)
        if every > 1:
            assert alike(model) == last
        if last:
            if clip:
                fabric.clip_gradients(model, optimizer, **clip)
            optimizer.step()
            optimizer.zero_grad()


def together(fabric: Any, **how: Any) -> nn.Module:
    bare = network()
    model, optimizer = fabric.setup(bare, momentum(bare))
    train(fabric, model, optimizer, **how)
    train(fabric, model, optimizer, **how)
    return bare


def apart(fabric: Any) -> nn.Module:
    bare = network()
    model = fabric.setup_module(bare)
    model.eval()
    model(torch.ones(2, 8))
    model.train()
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))
    train(fabric, model, optimizer)
    return bare


def scheduled(fabric: Any) -> nn.Module:
    bare = network()
    inner = momentum(bare)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
    model, optimizer, scheduler = fabric.setup(bare, inner, scheduler=scheduler)
    for _ in range(3):
        train(fabric, model, optimizer)
        scheduler.step()
    assert abs(optimizer.param_groups[0]["lr"] - 0.05 / 8) < 1e-9
    return bare


def marked(fabric: Any) -> nn.Module:
    """Trains through a method that Fabric is told of."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.mse_loss(self.net(x), y)

        def forward(self, x: torch.Tensor) -> Any:
            return self.net(x)

    bare = Own()
    model, optimizer = fabric.setup(bare, momentum(bare))
    model.mark_forward_method("loss")
    for x, y in fabric.setup_dataloaders(loader()):
        optimizer.zero_grad()
        fabric.backward(model.loss(x, y))
        optimizer.step()
    return bare


def gan(fabric: Any) -> nn.Module:
    """Two models with an optimizer each, each set up by itself."""
    maker, judge = network(2), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    both = nn.ModuleList([maker, judge])
    m, of_m = fabric.setup(maker, momentum(maker))
    j, of_j = fabric.setup(judge, torch.optim.Adam(judge.parameters(), lr=0.01))
    for noise, real in fabric.setup_dataloaders(loader()):
        of_m.zero_grad()
        fabric.backward(-j(m(noise)).mean())
        of_m.step()
        of_j.zero_grad()
        fabric.backward(j(m(noise).detach()).mean() - j(real).tanh().mean())
        of_j.step()
    return both


def scaled() -> MixedPrecision:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    return MixedPrecision("16-mixed", "cpu", scaler)


CASES: dict[str, Any] = {
    "together": (together, lambda: {}),
    "apart": (apart, lambda: {}),
    "accumulation": (lambda f: together(f, every=3), lambda: {}),
    "clipped by norm": (lambda f: together(f, clip={"max_norm": 0.1}), lambda: {}),
    "clipped by inf": (
        lambda f: together(f, clip={"max_norm": 0.1, "norm_type": "inf"}),
        lambda: {},
    ),
    "clipped by value": (lambda f: together(f, clip={"clip_val": 0.01}), lambda: {}),
    "bf16-mixed": (together, lambda: {"precision": "bf16-mixed"}),
    "16-mixed, clipped": (
        lambda f: together(f, clip={"max_norm": 0.1}),
        lambda: {"plugins": [scaled()]},
    ),
    "scheduled": (scheduled, lambda: {}),
    "marked": (marked, lambda: {}),
    "gan": (gan, lambda: {}),
}


def as_ddp(name: str) -> None:
    """Weights are those that Fabric's DDP trains."""
    case, options = CASES[name]
    with torchrun():
        expected = case(made(DDPStrategy(find_unused_parameters=name == "gan"), **options()))
        for strategy in EXACT.values():
            model = case(made(WingbeatStrategy(strategy), **options()))
            same_everywhere(model)
            close(dict(model.named_parameters()), dict(expected.named_parameters()))


def saved(kind: str, folder: str) -> None:
    """``fabric.save`` and ``load`` go on as without a stop, residuals of all workers included."""
    strategies = {**EXACT, "sketch": wingbeat.AllReduce(compression="sketch@2:auto_disable=false")}

    def begun() -> tuple[Any, Any, Any, nn.Module]:
        fabric = made(WingbeatStrategy(strategies[kind]))
        bare = network()
        model, optimizer = fabric.setup(bare, torch.optim.AdamW(bare.parameters(), lr=0.01))
        return fabric, model, optimizer, bare

    path = str(Path(folder) / "state.ckpt")
    with torchrun():
        fabric, model, optimizer, whole = begun()
        train(fabric, model, optimizer)
        fabric.save(path, {"model": model, "optimizer": optimizer, "epoch": 1})
        train(fabric, model, optimizer)
        fabric, model, optimizer, second = begun()
        state = {"model": model, "optimizer": optimizer, "epoch": 0}
        assert fabric.load(path, state) == {}
        assert state["epoch"] == 1
        train(fabric, model, optimizer)
        close(second.state_dict(), whole.state_dict(), 1e-5 if kind in EXACT else 1e-4)
        raw = fabric.load(path)
        optimizer.load_state_dict(raw["optimizer"])
        assert ("parts" in raw["optimizer"].get("wingbeat", {})) == (kind == "sketch")


def averaged(folder: str) -> None:
    """What is saved is the same on all workers, where models part."""
    with torchrun():
        fabric = made(WingbeatStrategy(wingbeat.LocalSGD(every=5)))
        bare = network()
        model, optimizer = fabric.setup(bare, momentum(bare))
        train(fabric, model, optimizer)
        fabric.save(str(Path(folder) / "a.ckpt"), {"model": model})
        same_everywhere(bare)


def refused() -> None:

    with torchrun():
        fabric = made(WingbeatStrategy(EXACT["dear"]))
        bare = network()
        model = fabric.setup_module(bare)
        said = line(lambda: model(torch.ones(2, 8)))
        assert said.startswith("Sequential was set up without an optimizer, so its gradients")
        said = line(lambda: fabric.setup_optimizers(momentum(network())))
        assert "no model of its parameters was set up" in said
        said = line(lambda: fabric.setup(network(), momentum(bare)))
        assert "does not belong to the model" in said
    with torchrun():
        fabric = made(WingbeatStrategy(EXACT["allreduce"]))
        bare = network()
        model, optimizer = fabric.setup(bare, momentum(bare))
        fabric.backward(model(torch.full((2, 8), float("nan"))).sum())
        with pytest.raises(RuntimeError, match="non-finite"):
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
