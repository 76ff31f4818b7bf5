"""Values that gradients have, and values that break codecs. Fixed seeds; float32 on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

Make = Callable[[int, torch.Generator], Tensor]


def normal(n: int, g: torch.Generator) -> Tensor:
    return torch.randn(n, generator=g)


def constant(n: int, g: torch.Generator) -> Tensor:
    return torch.full((n,), -0.3)


def all_zero(n: int, g: torch.Generator) -> Tensor:
    return torch.zeros(n).copysign(torch.randn(n, generator=g))


def mostly_zero(n: int, g: torch.Generator) -> Tensor:
    return torch.where(torch.rand(n, generator=g) < 0.9, 0.0, normal(n, g))


def some_zero(n: int, g: torch.Generator) -> Tensor:
    """Enough zeros for a code of their own with 8 bits, too few with 4."""
    return torch.where(torch.rand(n, generator=g) < 0.02, 0.0, normal(n, g))


def few_values(n: int, g: torch.Generator) -> Tensor:
    """Five distinct values: fewer than codes from 3 bits on."""
    return torch.tensor([-2.0, -0.5, 0.25, 1.0, 64.0])[torch.randint(5, (n,), generator=g)]


def denormal(n: int, g: torch.Generator) -> Tensor:
    """Down to 1e-45: some below 2**-133, where they count as zeros, some above."""
    return normal(n, g).sign() * (10.0 ** -(38 + 7 * torch.rand(n, generator=g).double())).float()


def infinite(n: int, g: torch.Generator) -> Tensor:
    x = normal(n, g)
    x[::97] = torch.inf
    x[5::131] = -torch.inf
    return x


def nan(n: int, g: torch.Generator) -> Tensor:
    """NaNs of both signs and several kinds."""
    x = normal(n, g)
    kinds = torch.tensor([0x7FC00000, -0x400000, 0x7F800001, -1], dtype=torch.int32)
    kinds = kinds.view(torch.float32)
    x[3::97] = kinds[torch.arange(len(x[3::97])) % 4]
    return x


def all_nan(n: int, g: torch.Generator) -> Tensor:
    return torch.full((n,), torch.nan)


def everything(n: int, g: torch.Generator) -> Tensor:
    """Many zeros, some NaN and infinite: with 1 bit no code is left for the others."""
    x = mostly_zero(n, g)
    x[::50] = torch.nan
    x[7::90] = -torch.inf
    return x


def wide(n: int, g: torch.Generator) -> Tensor:
    """All magnitudes from 1e-38 to 1e38, as many of each."""
    return normal(n, g).sign() * (10.0 ** (76 * torch.rand(n, generator=g).double() - 38)).float()


def student(n: int, g: torch.Generator) -> Tensor:
    """Student's t with 2 degrees of freedom, as small as gradients are: heavy tails."""
    chi2 = -2 * torch.rand(n, generator=g).clamp(min=1e-7).log()
    return 1e-3 * normal(n, g) / (chi2 / 2).sqrt()


def laplace(n: int, g: torch.Generator) -> Tensor:
    u = torch.rand(n, generator=g) - 0.5
    return -1e-3 * u.sign() * (1 - 2 * u.abs()).clamp(min=1e-7).log()


def ties(n: int, g: torch.Generator) -> Tensor:
    """Seven magnitudes of both signs, so that the k largest are hardly ever unique."""
    steps = torch.randint(-7, 8, (n,), generator=g)
    return steps.float() * 0.125


FINITE: dict[str, Make] = {
    f.__name__: f
    for f in (
        normal, constant, all_zero, mostly_zero, some_zero, few_values, denormal, wide, student,
        laplace, ties,
    )
}  # fmt: skip
BROKEN: dict[str, Make] = {f.__name__: f for f in (infinite, nan, all_nan, everything)}
ALL = FINITE | BROKEN
GRADIENTS: dict[str, Make] = {f.__name__: f for f in (normal, student, laplace)}


@cache
def _made(name: str, n: int, seed: int) -> Tensor:
    return ALL[name](n, torch.Generator().manual_seed(seed))


def values(name: str, n: int, seed: int = 1) -> Tensor:
    """A new tensor of ``n`` values of that kind."""
    return _made(name, n, seed).clone()
