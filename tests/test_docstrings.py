"""Every module can be imported by itself, and what its docstrings say is true."""

from __future__ import annotations

import ast
import doctest
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import wingbeat
from helpers.templates import ERRORS

SOURCE = Path(wingbeat.__file__).parents[1]
FILES = sorted(SOURCE.glob("wingbeat*/**/*.py"))
WITH_EXAMPLES = {"wingbeat", "wingbeat.errors", "wingbeat.types", "wingbeat.strategies"}


def _modules() -> list[str]:
    found = []
    for path in FILES:
        parts = path.relative_to(SOURCE).with_suffix("").parts
        if parts[-1] != "__main__":
            found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return found


@pytest.mark.parametrize("name", _modules())
def test_examples_are_true(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
    if name in WITH_EXAMPLES:
        assert result.attempted > 0


def _own_raises(function: ast.AST) -> set[str]:
    """Which of wingbeat's errors a function itself makes and raises."""
    made = {
        getattr(node.exc.func, "id", "")
        for node in ast.walk(function)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
    }
    return (made & ERRORS) | ({"UsageError"} if "unknown" in made else set())


def _public(tree: ast.AST, cls: ast.ClassDef | None = None) -> Iterator[tuple[str, str, ast.AST]]:
    """Public functions and methods, as (name, what their docstrings say, node)."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _public(node, node)
        elif isinstance(node, ast.FunctionDef):
            said = ast.get_docstring(node) or ""
            setter = any(getattr(each, "attr", "") == "setter" for each in node.decorator_list)
            if cls is not None and node.name in ("__init__", "__post_init__"):
                said += ast.get_docstring(cls) or ""
            elif node.name.startswith("_") or setter:  # a property's getter has the docstring
                continue
            yield f"{cls.name}.{node.name}" if cls else node.name, said, node


def test_who_raises_says_so() -> None:
    """In a docstring: the class of each error that the function makes by itself."""
    missing, looked_at = [], 0
    for path in FILES:
        if path.parent.name == "cli":  # where docstrings are the help of verbs
            continue
        for name, said, node in _public(ast.parse(path.read_text(encoding="utf-8"))):
            raises = _own_raises(node)
            looked_at += bool(raises)
            missing += [f"{path.relative_to(SOURCE)} {name}: {e}" for e in raises if e not in said]
    assert missing == []
    assert looked_at > 200
