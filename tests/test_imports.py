"""Only transport, integrations and the bench with its baselines touch torch.distributed.

import-linter cannot forbid a part of a package from outside, so this contract is held here; the
others are in pyproject.toml and are held by `make lint`.
"""

from __future__ import annotations

import ast
from pathlib import Path

import grimp
import pytest

import wingbeat

SOURCE = Path(wingbeat.__file__).parents[1]
ALLOWED = {("wingbeat", "transport"), ("wingbeat", "integrations"), ("wingbeat_lab", "bench")}


def touches_distributed(source: str) -> bool:
    """Whether source imports torch.distributed, or reaches it as an attribute of torch.

    What only a type checker imports does not count, nor the class `DTensor`, which the engine
    handles by its local tensors.
    """
    tree = ast.parse(source)
    for node in _at_run_time(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names = [f"{node.value.id}.{node.attr}"]
        else:
            continue
        others = [name for name in names if name != "torch.distributed.tensor.DTensor"]
        if any(f"{name}.".startswith("torch.distributed.") for name in others):
            return True
    return False


def _at_run_time(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        below: list[ast.AST] = list(node.orelse)
    else:
        below = list(ast.iter_child_nodes(node))
    return [node, *(found for child in below for found in _at_run_time(child))]


@pytest.mark.parametrize(
    ("source", "touches"),
    [
        ("import torch.distributed as dist", True),
        ("from torch import nn, distributed", True),
        ("from torch.distributed import Store", True),
        ("import torch.distributed.nn", True),
        ("from torch.distributed.tensor import distribute_tensor", True),
        ("from torch.distributed.tensor import DTensor", False),
        ("import torch\nif torch.distributed.is_initialized(): pass", True),
        ("def f():\n    import torch.distributed", True),
        ("if TYPE_CHECKING:\n    import torch.distributed", False),
        ("if TYPE_CHECKING:\n    pass\nelse:\n    import torch.distributed", True),
        ("import torch\nfrom torch import nn", False),
        ("import torch.distributions", False),
    ],
)
def test_the_rule_sees_what_it_should(source: str, touches: bool) -> None:
    assert touches_distributed(source) is touches


def test_only_transport_integrations_and_bench_touch_torch_distributed() -> None:
    files = [path.relative_to(SOURCE) for path in sorted(SOURCE.glob("wingbeat*/**/*.py"))]
    outside = [path for path in files if path.parts[:2] not in ALLOWED]
    assert {path.parts[0] for path in outside} == {"wingbeat", "wingbeat_lab"}
    found = [str(p) for p in outside if touches_distributed((SOURCE / p).read_text("utf-8"))]
    assert found == []


def circles() -> list[list[str]]:
    """Groups of modules that import one another at run time.

    A part names the types of what it builds for type checkers only, and a method's part imports
    what builds its runtime, real or in virtual time, when it is called.
    """
    graph = grimp.build_graph("wingbeat", "wingbeat_lab", exclude_type_checking_imports=True)
    for method in graph.find_children("wingbeat.methods"):
        for made in graph.find_modules_directly_imported_by(f"{method}.options"):
            if made in (f"{method}.build", f"{method}.simulated"):
                graph.remove_import(importer=f"{method}.options", imported=made)
    below = {
        module: graph.find_modules_directly_imported_by(module) - {"wingbeat"}
        for module in graph.modules - {"wingbeat"}
    }
    while free := [module for module, imported in below.items() if not imported & below.keys()]:
        for module in free:  # what imports nothing that is left is in no circle
            del below[module]
    return [[module, *sorted(imported & below.keys())] for module, imported in below.items()]


def test_no_module_imports_itself_through_others() -> None:
    assert circles() == []
