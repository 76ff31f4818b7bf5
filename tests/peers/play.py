"""Runs one of torch's tests in a worker process, with DDP itself or with wingbeat in its place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch

import wingbeat
from wingbeat.engine import engine
from wingbeat.engine.gradients import bucket

from . import torch_suite
from .ddp_face import ControlDDP, Face, Nothing

SEED = 20
TIMEOUT = 20.0
STRATEGIES = {"allreduce": wingbeat.AllReduce, "dear": wingbeat.DeAR}


_up = False


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Tell the faces of every optimizer that is made."""
    plain = torch.optim.Optimizer.__init__

    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        if not isinstance(self, Nothing):
            Face.made.append(self)

    with mock.patch.object(torch.optim.Optimizer, "__init__", make):
        yield


def run(name: str, who: str) -> None:
    """Run test ``name`` with ``who`` in DDP's place: ``ddp`` itself, or a strategy's name."""
    global _up
    suite = torch_suite.load()
    kind: type = ControlDDP
    if who != "ddp":
        if not _up:
            wingbeat.init(timeout=TIMEOUT)
            _up = True
        Face.strategy = STRATEGIES[who]
        kind = Face
    torch.manual_seed(SEED)
    with torch_suite.without_gpus(suite), torch_suite.with_ddp(suite, kind), _adopting():
        torch_suite.case(name)()
    Face.made.clear()
    while Face.alive:
        Face.alive[0].leave()


def run_wrongly(name: str, who: str) -> None:
    """As `run`, with gradients that are twice what they should be."""
    plain = bucket.fill

    def fill(slots: Sequence[bucket.Slot], scale: float) -> None:
        plain(slots, 2 * scale)

    with mock.patch.object(engine, "fill", fill):
        run(name, who)
