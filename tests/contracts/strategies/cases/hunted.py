"""Legal uses that once ended in other weights than DDP's, in silence or in a bare traceback."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..models import cross_entropy, mlp, sgd, train
from ..registry import ALL, BOTH, CODED, DIVIDED, Grid, Rig, add, check, scenario
from ..sides import Side, WingbeatSide
from .errors import refused

WHOLE = Grid(strategies=(*BOTH, *CODED))
DENSE = Grid(strategies=ALL)


def _one_step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    cross_entropy(model, x, y).backward()
    optimizer.step()


# -- readers inside of a backward ---------------------------------------------------------


def _hooked(read: Callable[[Any], float]) -> Callable[[Side], None]:
    def play(side: Side) -> None:
        bare: Any = mlp()
        model, optimizer = side.setup(bare, sgd(bare))
        seen: list[float] = []
        bare[2].register_full_backward_hook(lambda *_: seen.append(read(bare)))
        train(side, model, optimizer)
        side.note("seen", torch.tensor(seen))

    return play


def _norms(model: Any) -> float:
    return sum(float(p.detach().norm()) for p in model.parameters())


def _norms_in_another_thread(model: Any) -> float:
    """As a thread does that writes a log."""
    with ThreadPoolExecutor() as pool:
        return pool.submit(_norms, model).result()


def _norms_of_state(model: Any) -> float:
    return sum(float(p.norm()) for p in model.state_dict().values())


add(_hooked(_norms), "parameters_listed_in_a_backward_hook")
add(_hooked(_norms_in_another_thread), "parameters_listed_by_another_thread_in_a_backward")
add(_hooked(_norms_of_state), "state_dict_in_a_backward_hook")


class AsksForItsDevice(nn.Module):
    """Lists its parameters in a part that is computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def part(self, x: Tensor) -> Tensor:
        return torch.tanh(self.middle(x.to(next(self.parameters()).device)))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        out: Tensor = self.last(checkpoint(self.part, x, use_reentrant=False))
        return out


@scenario()
def parameters_listed_in_a_checkpointed_part(side: Side) -> None:
    model: Any = AsksForItsDevice()
    train(side, *side.setup(model, sgd(model)))


@scenario()
def a_forward_without_sync_after_one_with_it(side: Side) -> None:
    model: Any = mlp()
    model, optimizer = side.setup(model, sgd(model))
    for step in range(5):
        (x, y), (x2, y2) = side.batch(step), side.batch(step + 50)
        optimizer.zero_grad()
        loss = cross_entropy(model, x, y)
        with side.no_sync(model):
            loss = loss + cross_entropy(model, x2, y2)
        loss.backward()
        optimizer.step()


# -- gradients that are kept --------------------------------------------------------------


def _kept(keep: Callable[[Any], Tensor]) -> Callable[[Side], None]:
    """Gradients of two losses, made one after the other and combined, as PCGrad does."""

    def play(side: Side) -> None:
        model: Any = mlp()
        model, optimizer = side.setup(model, sgd(model))
        params = list(side.bare(model).parameters())
        for step in range(4):
            grads = []
            for part in (0, 50):
                optimizer.zero_grad()
                cross_entropy(model, *side.batch(step + part)).backward()
                grads.append([keep(p) for p in params])
            for p, a, b in zip(params, *grads, strict=True):
                p.grad = (a * 0.3 + b * 0.7).view(p.shape)
            optimizer.step()

    return play


add(_kept(lambda p: p.grad), "gradients_of_two_losses_kept", WHOLE)
add(_kept(lambda p: p.grad.view(-1)), "flat_gradients_of_two_losses_kept")


@scenario(WHOLE)
def gradients_kept_over_steps(side: Side) -> None:
    model: Any = mlp()
    model, optimizer = side.setup(model, sgd(model))
    params = list(side.bare(model).parameters())
    before: list[Any] = []
    for step in range(5):
        _one_step(model, optimizer, *side.batch(step))
        now = [p.grad for p in params]
        if before:
            side.note("product", sum(((a * b).sum() for a, b in zip(before, now, strict=True))))
        before = now


@scenario(WHOLE)
def gradients_read_after_they_were_dropped(side: Side) -> None:
    model: Any = mlp()
    model, optimizer = side.setup(model, sgd(model))
    for step in range(4):
        _one_step(model, optimizer, *side.batch(step))
        kept = [p.grad for p in side.bare(model).parameters()]
        optimizer.zero_grad()
        side.note("norm", torch.stack([g.norm() for g in kept]).norm())


class KeepsGradients(torch.optim.Optimizer):
    """Remembers ``p.grad`` itself until the next step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    before = self.state[p].get("before", p.grad)
                    self.state[p]["before"] = p.grad
                    p.add_(p.grad * 0.7 + before * 0.3, alpha=-group["lr"])


@scenario(WHOLE)
def an_optimizer_that_keeps_gradients(side: Side) -> None:
    model: Any = mlp()
    train(side, *side.setup(model, KeepsGradients(model.parameters())))


@check(Grid(strategies=DIVIDED))
def gradients_that_shards_have_dropped_cannot_be_read(rig: Rig) -> None:
    model: Any = mlp()
    params = list(model.parameters())
    side = WingbeatSide(rig.rank, rig.size, strategy=rig.strategy)
    model, optimizer = side.setup(model, sgd(model))
    for drop in (optimizer.zero_grad, optimizer.step):
        cross_entropy(model, *side.batch(0)).backward()
        kept = params[0].grad
        drop()
        refused(Exception, kept.norm, "no worker has whole", "clone()")
        optimizer.zero_grad()
    side.leave()


# -- layouts ------------------------------------------------------------------------------


class Images(nn.Module):
    """Convolutions, and a parameter that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 6, 3), nn.Conv2d(6, 5, 2)
        self.last = nn.Linear(5, 3)
        self.turned = nn.Parameter(torch.randn(8, 3).t())

    def forward(self, x: Tensor) -> Tensor:
        image = x.view(-1, 1, 2, 4).repeat(1, 2, 4, 2)
        found = self.second(torch.tanh(self.first(image))).mean((2, 3))
        out: Tensor = self.last(found) + x @ self.turned.t()
        return out


def _laid_out(make: Callable[[Any], Any]) -> Callable[[Side], None]:
    def play(side: Side) -> None:
        model: Any = Images().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        train(side, *side.setup(model, make(model.parameters())))

    return play


for _name, _make in {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}.items():
    add(_laid_out(_make), f"fused_{_name}_with_parameters_in_channels_last", DENSE)


@check(Grid(strategies=CODED))
def fused_with_codecs_and_channels_last(rig: Rig) -> None:
    model: Any = Images().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    side = WingbeatSide(rig.rank, rig.size, strategy=rig.strategy)
    refused(Exception, lambda: side.setup(model, optimizer), "fused=True", "foreach=True")


@scenario(Grid(strategies=(*BOTH, *CODED)))
def parameters_that_share_memory(side: Side) -> None:
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))
    model[2].weight.data = model[0].weight.data
    train(side, *side.setup(model, sgd(model)))


@check(Grid(strategies=DIVIDED))
def shards_of_parameters_that_share_memory(rig: Rig) -> None:
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model[2].weight.data = model[0].weight.data
    side = WingbeatSide(rig.rank, rig.size, strategy=rig.strategy)
    refused(
        Exception, lambda: side.setup(model, sgd(model)), "'0.weight'", "'2.weight'", "share memory"
    )
