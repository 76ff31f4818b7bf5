"""What tests of benchmarks share."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from helpers.scripts import Refusal


@pytest.fixture
def refusal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Refusal:
    """Returns the error of a benchmark that refuses its arguments before it starts a lab."""

    def said(script: ModuleType, words: Sequence[str]) -> str:
        name = Path(script.__file__ or "").name
        monkeypatch.setattr(sys, "argv", [name, "--json", str(tmp_path / "a.json"), *words])
        monkeypatch.setattr(script.lab, "run", lambda *_, **__: pytest.fail("it started"))
        assert script.main() == 2
        return capsys.readouterr().err

    return said
