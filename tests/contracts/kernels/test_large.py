"""A gradient of 25 million values, in one payload."""

from __future__ import annotations

import math

import pytest
import torch

from wingbeat.kernels import layout

from . import data
from .rig import Kernels, relative_error, same_bits

N = 25_000_003


@pytest.fixture(autouse=True)
def _not_interpreted(kernels: Kernels) -> None:
    if kernels.interpreted:
        pytest.skip("25 million values take hours when Python interprets the kernels")


@pytest.mark.slow
def test_sketch(kernels: Kernels, reference: Kernels) -> None:
    x, residual = data.values("student", N), torch.zeros(N)
    payload = kernels.sketch(x, 8, residual=residual)
    decoded = kernels.sketch_decode(payload, N, 8)
    assert torch.equal(residual, x - decoded)
    theirs = reference.sketch_decode(reference.sketch(x, 8), N, 8)
    assert math.isclose(relative_error(decoded, x), relative_error(theirs, x), rel_tol=0.01)


@pytest.mark.slow
def test_topk(kernels: Kernels, reference: Kernels) -> None:
    x, residual = data.values("ties", N), torch.zeros(N)
    k = layout.count_of(N, 0.01)
    payload = kernels.topk(x, k, residual=residual)
    assert torch.equal(payload, reference.topk(x, k))
    decoded = kernels.topk_decode(payload, N, k)
    assert same_bits(residual + decoded, x + 0.0)
