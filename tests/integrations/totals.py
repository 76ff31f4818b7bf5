"""Adds up: what DDP delivered and what is still missing must be what the workers put in.

The gradients are chosen, not computed: the loss is the sum of each parameter times a given tensor.
So after any number of iterations

    sum of delivered averages + sum over workers of residuals = sum of true averages

up to the rounding of float32, for every element of every parameter.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from wingbeat.integrations import ddp

SHAPES = {"wide": (70, 61), "tiny": (3,), "scalar": (), "long": (3001,), "square": (37, 37)}
MANY_BUCKETS = 0.004
"""MB of a bucket: several, most with more than one parameter."""

Used = Callable[[int, int, str], bool]
"""Whether iteration, rank use the parameter of that name."""


class Chosen(nn.Module):
    """A model whose gradients are what they are told to be."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(torch.zeros(shape)))

    def forward(self, wanted: dict[str, Tensor]) -> Tensor:
        parts = [(getattr(self, name) * want).sum().float() for name, want in wanted.items()]
        return torch.stack(parts).sum()


def gradient(step: int, rank: int, name: str) -> Tensor:
    """Few large values among many small ones, others on every rank and in every step."""
    seed = 1000 * step + 10 * rank + zlib.crc32(name.encode()) % 99_991
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(SHAPES[name], generator=generator)
    return (values**3).round(decimals=3)


def always(step: int, rank: int, name: str) -> bool:
    return True


def make_state(kind: str, model: nn.Module, **options: Any) -> tuple[Any, Any]:
    """A state and its hook; ``sketch`` and ``topk`` lose as much as they can."""
    if kind == "sketch":
        usual = {} if "wire" in options else {"bits": 2}
        return ddp.SketchState(model, **{**usual, **options}), ddp.sketch_hook
    if kind == "wire":
        return ddp.WireState(model, **options), ddp.wire_hook
    return ddp.TopKState(model, **{"density": 0.02, **options}), ddp.topk_hook


class Totals:
    """Trains a `Chosen` model and adds up what this worker puts in and gets."""

    def __init__(self, kind: str, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        state_options = options.pop("state", {})
        bare = options.pop("bare", False)
        options.setdefault("bucket_cap_mb", MANY_BUCKETS)
        self.group = options.get("process_group")
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.dtype = dtype
        self.model = DistributedDataParallel(Chosen().to(dtype), **options)
        given = self.model.module if bare else self.model
        self.state, hook = make_state(kind, given, **state_options)
        self.model.register_comm_hook(self.state, hook)
        self.put_in: dict[str, Any] = defaultdict(float)
        self.delivered: dict[str, Any] = defaultdict(float)

    def train(self, steps: range, used: Used = always, backwards: int = 1) -> None:
        for step in steps:
            self.model.zero_grad()
            for number in range(backwards - 1):
                with self.model.no_sync():
                    self._backward(100 * step + number, used)
            self._backward(step, used)
            for name, param in self.model.module.named_parameters():
                if param.grad is not None:
                    self.delivered[name] += param.grad.double()

    def _backward(self, step: int, used: Used) -> None:
        ranks = range(self.size)
        for name in SHAPES:
            for rank in ranks:
                if used(step, rank, name):
                    given = gradient(step, rank, name).to(self.dtype)
                    self.put_in[name] += given.double() / self.size
        mine = {n: gradient(step, self.rank, n) for n in SHAPES if used(step, self.rank, n)}
        self.model({name: value.to(self.dtype) for name, value in mine.items()}).backward()

    def missing(self) -> dict[str, Tensor]:
        """What all workers together have not sent."""
        found = {}
        for name, value in self.state.state_dict()["residuals"].items():
            total = value.double()
            dist.all_reduce(total, group=self.group)
            found[name] = total
        return found

    def check(self, tolerance: float = 2e-5) -> dict[str, Tensor]:
        """Check the sums of every parameter; return what is missing."""
        missing = self.missing()
        for name in SHAPES:
            got = self.delivered[name] + missing[name]
            torch.testing.assert_close(
                got,
                torch.as_tensor(self.put_in[name]).expand(got.shape),
                rtol=tolerance,
                atol=tolerance,
                msg=lambda text, name=name: f"{name}: {text}",
            )
        return missing

    def same_everywhere(self) -> None:
        """Check that every worker was given the same bits."""
        for name, value in self.delivered.items():
            others = [torch.empty_like(value) for _ in range(self.size)]
            dist.all_gather(others, value, group=self.group)
            assert all(torch.equal(value, other) for other in others), f"{name} differs"

    def close(self) -> None:
        self.state.close()
