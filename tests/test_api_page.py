"""``docs/api.md`` says that it is complete: so it is compared with what there is."""

from __future__ import annotations

import ast
import importlib
import inspect
import pydoc
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import wingbeat
import wingbeat_lab
from wingbeat import errors, integrations, parts
from wingbeat.engine.upgrade import DistributedModel, DistributedOptimizer

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
DIRECTIVE = re.compile(r"^\.\. auto(\w+):: ([\w.]+)\n((?: +:.*\n)*)", re.MULTILINE)
SHOWN = {name: (kind, options) for kind, name, options in DIRECTIVE.findall(PAGE)}


def members(name: str) -> set[str]:
    """What the page lists of a class or module."""
    _, options = SHOWN[name]
    [listed] = re.findall(r":members:(.*)", options)
    return {member.strip() for member in listed.split(",")}


def test_every_public_name_stands_there_once() -> None:
    names = [name for _, name, _ in DIRECTIVE.findall(PAGE)]
    assert len(names) == len(set(names))
    packages = {"errors", "lab", "paced", "parts", "simulator", "testing", "topologies"}
    for package in (wingbeat, wingbeat_lab):
        own = [each for each in names if each.startswith(f"{package.__name__}.")]
        of_package = {each.split(".")[1] for each in own if each.count(".") == 1}
        assert of_package - packages == set(package.__all__)


@pytest.mark.parametrize("name", [*wingbeat.__all__, *wingbeat_lab.__all__])
def test_a_class_is_shown_as_a_class(name: str) -> None:
    package = wingbeat if name in wingbeat.__all__ else wingbeat_lab
    kind, _ = SHOWN[f"{package.__name__}.{name}"]
    assert kind == ("class" if inspect.isclass(getattr(package, name)) else "function")


@pytest.mark.parametrize(
    ("cls", "base"),
    [(DistributedModel, torch.nn.Module), (DistributedOptimizer, torch.optim.Optimizer)],
)
def test_every_method_that_distribute_adds_stands_there(cls: type, base: type) -> None:
    public = {name for name in vars(cls) if not name.startswith("_") and not hasattr(base, name)}
    # An optimizer has its groups since it was made, not by its class.
    public -= {"param_groups", "state"}
    assert members(f"wingbeat.engine.upgrade.{cls.__name__}") == public


def test_every_part_stands_there() -> None:
    assert members("wingbeat.parts") | set(wingbeat.__all__) >= set(parts.__all__)
    assert members("wingbeat.parts") <= set(parts.__all__)


WHOLE = (
    "wingbeat.integrations.accelerate",
    "wingbeat.integrations.checkpoint",
    "wingbeat.integrations.ddp",
    "wingbeat_lab.lab",
    "wingbeat_lab.paced",
    "wingbeat.simulator",
    "wingbeat.testing",
    "wingbeat.topologies",
)
"""Packages whose names are all for users, and stand on the page together."""


@pytest.mark.parametrize("package", WHOLE)
def test_every_name_of_a_package_stands_there(package: str) -> None:
    module = importlib.import_module(package)
    public = {name for name in module.__all__ if not inspect.ismodule(getattr(module, name))}
    apart = {name for name in public if f"{package}.{name}" in SHOWN}
    # What strategies are composed of stands there once.
    apart |= {n for n in members("wingbeat.parts") if getattr(module, n, 0) is getattr(parts, n)}
    assert members(package) == public - apart


@pytest.mark.parametrize("package", ["transport", "transport.messages", "observe"])
def test_every_name_of_a_package_stands_there_by_itself(package: str) -> None:
    module = importlib.import_module(f"wingbeat.{package}")
    short = {name for name in module.__all__ if f"wingbeat.{name}" in SHOWN}
    assert {f"wingbeat.{package}.{name}" for name in set(module.__all__) - short} <= set(SHOWN)


LISTED = [
    name
    for name, (_, options) in SHOWN.items()
    if ":members: " in options and not name.startswith("wingbeat.integrations.")
]


@pytest.mark.parametrize("name", LISTED)
def test_listed_members_are_found_by_dir(name: str) -> None:
    """Sphinx takes a name that ``dir`` does not list for one that is missing."""
    assert members(name) <= set(dir(pydoc.locate(name)))


def test_every_error_stands_there() -> None:
    raised = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.WingbeatError)
    }
    assert members("wingbeat.errors") == raised


def test_every_integration_stands_there() -> None:
    """Without loading the libraries, which takes many seconds."""
    for name in integrations.__all__:
        module = f"wingbeat.integrations.{name}"
        path = ROOT / "src/wingbeat/integrations" / name
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        public = assigned(path, "__all__")
        if module in SHOWN:
            assert members(module) == public
        else:
            assert {f"{module}.{each}" for each in public} <= set(SHOWN)


def assigned(path: Path, name: str) -> set[str]:
    """The texts of the list that a module gives a name to."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == name:
            return set(ast.literal_eval(node.value))
    raise AssertionError(f"{path} has no {name}")


def imported() -> Iterator[tuple[str, str]]:
    """What the programs of the pages, and the examples, import from wingbeat, and where."""
    texts = [(path.name, path.read_text(encoding="utf-8")) for path in ROOT.glob("examples/*.py")]
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        blocks = re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
        texts += [(path.name, block) for block in blocks]
    for where, text in texts:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("wingbeat"):
                yield from ((where, f"{node.module}.{alias.name}") for alias in node.names)


def test_what_the_pages_import_stands_there() -> None:
    shown = set(SHOWN) | {
        f"{name}.{each}" for name, (_, options) in SHOWN.items() if ":members: " in options
        for each in members(name)
    }  # fmt: skip
    modules = {name.rpartition(".")[0] for name in shown}
    found = list(imported())
    assert len(found) > 40
    assert [each for each in found if each[1] not in shown | modules] == []
