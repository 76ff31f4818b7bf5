"""``docs/how-to/choose.md``: its ratio is computed, its strategies and its bench exist."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

import wingbeat
from wingbeat.strategies import parse
from wingbeat_lab.cli.bench import spread

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "how-to/choose.md").read_text(encoding="utf-8")
STRATEGIES = sorted(set(re.findall(r"`([A-Z]\w*\([^`]*\))`", PAGE)) - {"DDP(model)"})


def test_program_prints_the_ratio_of_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    [program] = re.findall(r"```python\n(def .*?)```", PAGE, re.DOTALL)
    exec(program, {})
    assert f"That is {round(float(capsys.readouterr().out), 1)}:" in PAGE


@pytest.mark.parametrize("text", STRATEGIES)
def test_its_strategies_can_be_made(text: str) -> None:
    assert len(STRATEGIES) > 10
    eval(f"wingbeat.{text}", {"wingbeat": wingbeat})


def test_its_command_is_right() -> None:
    [command] = re.findall(r"^wingbeat bench (.*)$", PAGE, re.MULTILINE)
    words = spread(command.split())
    rows = [after for word, after in itertools.pairwise(words) if word == "--strategies"]
    assert len(rows) == 4
    for row in rows[2:]:
        parse(row)
