"""The modes in force where a deferred update happens to be made: it must not notice them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..models import adamw, mlp, sgd, train
from ..registry import BOTH, Grid, add, scenario
from ..sides import Side


class Halving(TorchFunctionMode):
    """Halves whatever is added in place, which no forward here does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("add_", "mul_", "addcdiv_", "lerp_", "_foreach_add_", "_foreach_mul_"):
            raise AssertionError(f"{name} of an update is seen by the mode of a forward")
        return func(*args, **(kwargs or {}))


class Watching(TorchDispatchMode):
    """Refuses changes in place, which no forward here makes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "foreach" not in str(func), f"{func} of an update is seen by the mode of a forward"
        return func(*args, **(kwargs or {}))


def _adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=0.05)


def _muon(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.02)


def _under(mode: Callable[[], AbstractContextManager[Any]], make: Any) -> Callable[[Side], None]:
    """Forward under a mode, backward and step outside, as with autocast."""

    def play(side: Side) -> None:
        model = mlp()
        model, optimizer = side.setup(model, make(model))
        for step in range(5):
            x, y = side.batch(step)
            optimizer.zero_grad()
            with mode():
                out = model(x)
            F.cross_entropy(out.float(), y).backward()
            optimizer.step()

    return play


def _autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


add(_under(_autocast, _adafactor), "forward_under_autocast_adafactor", Grid(strategies=BOTH))
add(_under(_autocast, adamw), "forward_under_autocast_adamw")
add(_under(Halving, adamw), "forward_under_a_function_mode")
add(_under(Watching, adamw), "forward_under_a_dispatch_mode")
if hasattr(torch.optim, "Muon"):
    add(_under(_autocast, _muon), "forward_under_autocast_muon", Grid(strategies=BOTH))


def _evaluated_first(make: Any) -> Callable[[Side], None]:
    """The first step's update is made in an evaluation under inference mode."""

    def play(side: Side) -> None:
        model: Any = mlp()
        bare = model
        model, optimizer = side.setup(model, make(model))
        for step in range(4):
            train(side, model, optimizer, [step])
            if step in (0, 2):  # what is made inside must be of use outside
                bare.eval()
                with torch.inference_mode():
                    side.note("output", bare(side.batch(50)[0]).clone())
                bare.train()

    return play


add(_evaluated_first(adamw), "inference_mode_right_after_step_adamw")
add(
    _evaluated_first(_adafactor),
    "inference_mode_right_after_step_adafactor",
    Grid(strategies=BOTH),
)


@scenario()
def gradients_of_a_function_right_after_step(side: Side) -> None:
    """``torch.func`` transforms of a forward: the update is made inside of one."""
    model: Any = mlp()
    bare = model
    model, optimizer = side.setup(model, sgd(model))
    for step in range(4):
        train(side, model, optimizer, [step])
        x, _ = side.batch(60)

        def loss(x: Tensor) -> Tensor:
            out: Tensor = bare(x).square().sum()
            return out

        bare.eval()
        side.note("of inputs", torch.func.grad(loss)(x))
        bare.train()


@scenario()
def vmap_right_after_step(side: Side) -> None:
    model: Any = mlp()
    layer = model[0]
    model, optimizer = side.setup(model, adamw(model))
    for step in range(4):
        train(side, model, optimizer, [step])
        x, _ = side.batch(60)
        side.note("rows", torch.vmap(lambda row: F.linear(row, layer.weight, layer.bias))(x))


@scenario()
def under_anomaly_detection_and_deterministic(side: Side) -> None:
    model: Any = mlp()
    model, optimizer = side.setup(model, sgd(model))
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        train(side, model, optimizer, range(3))
