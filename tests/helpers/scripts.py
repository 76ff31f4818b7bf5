"""Benchmarks as modules: they are scripts, and no part of the package."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

Refusal = Callable[[ModuleType, Sequence[str]], str]
"""The fixture `refusal`: a benchmark and arguments that it refuses; the error."""

FOLDER = Path(__file__).parents[2] / "benchmarks"


@contextmanager
def benchmark(name: str) -> Iterator[ModuleType]:
    """``benchmarks/NAME.py``, which finds its neighbours as it does when it is run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        yield module
