"""Every module can be imported by itself, and the examples in its docstrings are true."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import wingbeat

ROOT = Path(wingbeat.__file__).parent
WITH_EXAMPLES = {"wingbeat", "wingbeat.errors", "wingbeat.types", "wingbeat.strategies"}


def _modules() -> list[str]:
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        parts = ["wingbeat", *path.relative_to(ROOT).with_suffix("").parts]
        if parts[-1] != "__main__":
            found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return found


@pytest.mark.parametrize("name", _modules())
def test_examples_are_true(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
    if name in WITH_EXAMPLES:
        assert result.attempted > 0
