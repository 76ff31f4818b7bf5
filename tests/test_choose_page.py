"""``docs/how-to/choose.md``: its program runs, its strategies exist, its figures are measured."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

import wingbeat
from wingbeat.cli.bench import spread
from wingbeat.strategies import parse

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "how-to/choose.md").read_text(encoding="utf-8")
STRATEGIES = sorted(set(re.findall(r"`([A-Z]\w*\([^`]*\))`", PAGE)) - {"DDP(model)"})


def test_its_program_says_what_the_text_says(capsys: pytest.CaptureFixture[str]) -> None:
    [program] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(program, {})
    said = round(float(capsys.readouterr().out), 1)
    assert f"That is {said}:" in PAGE


@pytest.mark.parametrize("text", STRATEGIES)
def test_its_strategies_can_be_made(text: str) -> None:
    assert len(STRATEGIES) > 10
    eval(f"wingbeat.{text}", {"wingbeat": wingbeat}).compose()


def test_its_command_is_right() -> None:
    [command] = re.findall(r"^wingbeat bench (.*)$", PAGE, re.MULTILINE)
    words = spread(command.split())
    rows = [after for word, after in itertools.pairwise(words) if word == "--strategies"]
    assert len(rows) == 4
    for row in rows[2:]:
        parse(row)


def test_its_gains_are_those_of_the_whole_tables() -> None:
    """Of the last table: DDP's milliseconds in results.md over the strategy's."""
    results = (DOCS / "results.md").read_text(encoding="utf-8")
    names = {
        "`DeAR()`, exact": "`dear:plan=fixed`",
        '`DeAR(wire="bf16")`': "`dear:plan=fixed,wire=bf16`",
        '`DeAR(wire="sketch@4")`': "`dear:plan=fixed,wire=sketch@4`",
        "`OMGS()`": "`omgs`",
        '`DiLoCo(every=30, wire="sketch@4")`, a step': "`diloco:every=30,wire=sketch@4`",
    }
    tables = [_rows(results, f"| {model} | 100mbit") for model in ("resnet50", "bert_base")]
    gains = _rows(PAGE, "| | ResNet-50: 100 Mbit/s")
    for shown, row in names.items():
        told = [t["`ddp`"][i] / t[row][i] for t in tables for i in range(4)]
        assert gains[shown] == pytest.approx(told, rel=0.05), shown


def _rows(text: str, head: str) -> dict[str, list[float]]:
    """The rows of numbers of the table that begins with this line."""
    lines = text[text.index(head) :].split("\n\n", 1)[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    return {row[0]: [float(cell) for cell in row[1:]] for row in cells if "" not in row}
