"""Tensors of wingbeat's own do not follow the script's `torch.set_default_device`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

SRC = Path(__file__).resolve().parents[1] / "src"

FACTORIES = {each.__name__ for each in _device_constructors()}
"""Functions of torch that the default device applies to."""

FILES = sorted(
    path
    for folder in ("wingbeat", "wingbeat_lab/ako", "wingbeat_lab/bytescheduler")
    for path in (SRC / folder).rglob("*.py")
)


def without_device(source: str) -> Iterator[int]:
    """Yield the lines of calls that make a tensor and name no device."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(ast.Attribute(ast.Name("torch"), name), _, keywords) if (
                name in FACTORIES and "device" not in {each.arg for each in keywords}
            ):
                yield node.lineno


def test_call_without_a_device_is_found() -> None:
    source = 'torch.zeros(\n1)\ntorch.ones(2, device="cpu")\ntorch.zeros_like(x)\ntorch.tensor([1])'
    assert list(without_device(source)) == [1, 5]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_each_tensor_is_made_on_a_named_device(path: Path) -> None:
    lines = list(without_device(path.read_text(encoding="utf-8")))
    assert not lines, f"{path}: name the device in the calls of lines {lines}"
