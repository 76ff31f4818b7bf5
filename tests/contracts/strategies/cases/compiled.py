"""What ``torch.compile`` makes of a model, of its parts, and of functions that train it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..models import adamw, cross_entropy, mlp, sgd
from ..registry import TINY, Grid, add
from ..sides import Side


def _compiled(what: str) -> Callable[[Side], None]:
    """As ``torch.compile`` does it; "aot_eager" is all of it but the code generator."""

    def play(side: Side) -> None:
        torch.compiler.reset()
        model: Any = nn.Sequential(mlp(classes=8), nn.Tanh(), nn.Linear(8, 3))
        options = {"backend": "aot_eager"}
        if side.is_subject and what == "a_part":
            model[0].compile(**options)
        if side.is_subject and what == "in_place":
            model.compile(**options)
        model, optimizer = side.setup(model, adamw(model))
        run = torch.compile(model, **options) if side.is_subject and what == "after" else model
        for step in range(5):
            optimizer.zero_grad()
            cross_entropy(run, *side.batch(step)).backward()
            optimizer.step()

    return play


for _what in ("a_part", "in_place", "after"):
    add(_compiled(_what), f"compiled_{_what}", Grid(worlds=(2,), mbs=(TINY,)), find_unused=False)


def _compiled_around(what: str) -> Callable[[Side], None]:
    """Functions of the user that step, compiled: nothing in them may run twice, or be left out."""

    def play(side: Side) -> None:
        torch.compiler.reset()
        model: Any = mlp()
        model, optimizer = side.setup(model, sgd(model))

        def step_only() -> None:
            optimizer.step()

        def whole(x: Tensor, y: Tensor) -> None:
            optimizer.zero_grad()
            cross_entropy(model, x, y).backward()
            optimizer.step()

        compiled = torch.compile if side.is_subject else lambda run, **_: run
        step_alone = compiled(step_only, backend="aot_eager")
        all_of_it = compiled(whole, backend="aot_eager")
        for step in range(4):
            x, y = side.batch(step)
            if what == "iteration":
                all_of_it(x, y)
                continue
            optimizer.zero_grad()
            cross_entropy(model, x, y).backward()
            step_alone()

    return play


for _what in ("step", "iteration"):
    _grid = Grid(worlds=(2,), mbs=(TINY,))
    add(_compiled_around(_what), f"compiled_function_with_{_what}", _grid, find_unused=False)
