"""What every test gets: skips that say why, fixed seeds, and the same hypothesis runs in CI."""

from __future__ import annotations

import builtins
import os
import random
import sys
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

SEED = 20_240

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


@cache
def _why_no_lab() -> str:
    """Why this machine cannot make an emulated cluster; empty if it can."""
    from wingbeat.lab import available

    return available() or ""


@cache
def _why_no_gpu() -> str:
    import torch

    return "" if torch.cuda.is_available() else "needs a CUDA device"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what this machine cannot run, with the reason."""
    for marker, why in (("lab", _why_no_lab), ("gpu", _why_no_gpu)):
        if item.get_closest_marker(marker) and why():
            pytest.skip(f"{marker}: {why()}")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Same random numbers in every run, whatever ran before."""
    random.seed(SEED)
    np.random.seed(SEED)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(SEED)


@pytest.fixture
def no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment in which matplotlib was not installed."""
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
