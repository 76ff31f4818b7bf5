"""One worker of a program made of a page's Python blocks; torchrun starts it.

    python block_worker.py program.json

Blocks find the names of a training script: ``Model``, ``model``, ``optimizer``, ``loss_fn``,
``dataset`` and ``loader``. A block that distributes a model and has no loop is followed by two
steps of training.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import wingbeat

_DISTRIBUTES = re.compile(r"\bdistribute\(")
_OWN_MODEL = re.compile(r"^model\b[^=\n]*=(?! *wingbeat\.distribute| *distribute)", re.MULTILINE)


class Model(nn.Sequential):
    """A small classifier of 16 numbers into 4 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("embedding", nn.Linear(16, 32))
        self.add_module("activation", nn.ReLU())
        self.add_module("head", nn.Linear(32, 4))


def names() -> dict[str, Any]:
    """Return what a script has before it meets wingbeat."""
    made = torch.Generator().manual_seed(20_240)
    x = torch.randn(64, 16, generator=made)
    y = torch.randint(4, (64,), generator=made)
    return {
        "__name__": "__main__",
        "torch": torch,
        "nn": nn,
        "wingbeat": wingbeat,
        "Model": Model,
        "loss_fn": nn.functional.cross_entropy,
        "dataset": TensorDataset(x, y),
        "loader": [(x[at : at + 16], y[at : at + 16]) for at in range(0, 64, 16)],
        **fresh(),
    }


def fresh() -> dict[str, Any]:
    """Return a new model and its optimizer, equal on all workers."""
    torch.manual_seed(20_240)
    model = Model()
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    }


def train(space: dict[str, Any]) -> None:
    """Train two steps with what the block has distributed."""
    model, optimizer = space["model"], space["optimizer"]
    for x, y in space["loader"][:2]:
        optimizer.zero_grad()
        loss = space["loss_fn"](model(x), y)
        loss.backward()
        optimizer.step()
        assert torch.isfinite(loss), loss


def run(piece: dict[str, Any], space: dict[str, Any]) -> None:
    """Run one block in the names of the blocks before it."""
    code, distributes = piece["code"], bool(_DISTRIBUTES.search(piece["code"]))
    if distributes and not _OWN_MODEL.search(code):
        if space.pop("distributed", False):
            wingbeat.release(space["model"], space["optimizer"])
        space.update(fresh())
    exec(piece["before"], space)
    lines = "\n" * (piece["line"] - 1) + code  # a traceback shows the line of the page
    try:
        exec(compile(lines, piece["name"], "exec"), space)
    except Exception as err:
        if type(err).__name__ != piece["fails"]:
            raise
        return
    assert not piece["fails"], f"{piece['name']}:{piece['line']}: no {piece['fails']}"
    if distributes and isinstance(space.get("model"), nn.Module):
        space["distributed"] = True
        if ".backward()" not in code:
            train(space)


def main() -> None:
    """Run the blocks of the program one after another."""
    program = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    space = names()
    if program["init"]:
        wingbeat.init()
    for piece in program["pieces"]:
        run(piece, space)


if __name__ == "__main__":
    main()
