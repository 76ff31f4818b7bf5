"""Which kernels ``of`` picks, and that it says so once where they are the slow ones."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from wingbeat import kernels
from wingbeat.kernels import reference


@pytest.fixture(autouse=True)
def _not_remembered() -> Iterator[None]:
    kernels._of.cache_clear()
    yield
    kernels._of.cache_clear()


def importing(monkeypatch: pytest.MonkeyPatch, *, fails: bool) -> list[str]:
    """Let fast kernels be there, or not; returns the names that were asked for."""
    asked: list[str] = []
    really = importlib.import_module

    def fake(name: str, *rest: Any) -> ModuleType:
        asked.append(name)
        if name.endswith((".native", ".gpu")):
            if fails:
                raise ImportError("no such extension")
            return ModuleType(name)
        return really(name, *rest)

    monkeypatch.setattr(importlib, "import_module", fake)
    return asked


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("cpu", "wingbeat.kernels.native"),
        ("cuda", "wingbeat.kernels.gpu"),
        ("cuda:1", "wingbeat.kernels.gpu"),
    ],
)
def test_the_fast_ones(monkeypatch: pytest.MonkeyPatch, device: str, name: str) -> None:
    importing(monkeypatch, fails=False)
    assert kernels.of(torch.device(device)).__name__ == name


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_them_the_reference_and_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, device: str
) -> None:
    importing(monkeypatch, fails=True)
    with caplog.at_level(logging.WARNING, logger="wingbeat"):
        assert kernels.of(torch.device(device)) is reference
        assert kernels.of(torch.device(device, 0)) is reference
    assert [record.name for record in caplog.records] == ["wingbeat"]
    assert device in caplog.text
    assert "no such extension" in caplog.text


def test_elsewhere_the_reference_and_nothing_to_say(caplog: pytest.LogCaptureFixture) -> None:
    assert kernels.of(torch.device("meta")) is reference
    assert caplog.records == []
