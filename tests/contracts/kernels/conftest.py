"""``kernels``: each implementation in turn. One that cannot run here is skipped with its reason."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from .rig import Kernels

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_CUDA: Any = pytest.mark.gpu


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    """Thousands of small operations are slowed down by threads, not sped up."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


_FAST = (
    pytest.param("reference_cuda", marks=_CUDA),
    "native",
    pytest.param("gpu", marks=() if INTERPRETED else _CUDA),
)


@pytest.fixture(scope="session", params=["reference", *_FAST])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """The implementation under test."""
    return _load(str(request.param))


@pytest.fixture(scope="session", params=_FAST)
def fast(request: pytest.FixtureRequest) -> Kernels:
    """All but the reference, where being as it is is all there is to ask."""
    return _load(str(request.param))


def _load(name: str) -> Kernels:
    on_gpu = name == "reference_cuda" or (name == "gpu" and not INTERPRETED)
    try:
        module = importlib.import_module(f"wingbeat.kernels.{name.partition('_')[0]}")
    except ImportError as err:
        pytest.skip(f"{name} kernels cannot be imported: {err}")
    return Kernels(
        name, module, torch.device("cuda" if on_gpu else "cpu"), name == "gpu" and INTERPRETED
    )


@pytest.fixture(scope="session")
def reference() -> Kernels:
    """What the others are held against."""
    module = importlib.import_module("wingbeat.kernels.reference")
    return Kernels("reference", module, torch.device("cpu"))
