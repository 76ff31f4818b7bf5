"""``docs/developers/compose-a-strategy.md``: examples run, and tables are what the code says."""

from __future__ import annotations

import doctest
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from wingbeat import compression, parts
from wingbeat.parts import names
from wingbeat.traits import Part
from wingbeat_lab import baselines

if TYPE_CHECKING:
    from helpers.pool import Pool

PAGE = Path(__file__).parents[2] / "docs/developers/compose-a-strategy.md"
TEXT = PAGE.read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TEXT.splitlines()
    if line.startswith("| ")
]


def run(example: str) -> None:
    """Run an example as a script would."""
    code = compile(example, str(PAGE), "exec", dont_inherit=True)
    exec(code, {"__name__": "page"})


def named() -> dict[str, type]:
    """Every name of the code, and what it makes; the names of dtypes make nothing."""
    tables = (
        names.PLANS,
        compression.BY_NAME,
        names.EXCHANGES,
        names.SCHEDULES,
        names.UPDATES,
    )
    return {name: type(entry.make()) for table in tables for name, entry in table.items()}


def test_the_training_on_the_page_runs_with_one_worker() -> None:
    run(EXAMPLES[0])


@pytest.mark.slow
def test_the_training_on_the_page_runs_with_two(fresh_pool: Callable[..., Pool]) -> None:
    fresh_pool(2).run(run, EXAMPLES[0])


@pytest.mark.parametrize("example", EXAMPLES[1:])
def test_an_example_runs(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(example)
    assert " ms" in capsys.readouterr().out


def test_what_is_typed_there_is_answered_so() -> None:
    result = doctest.testfile(str(PAGE), module_relative=False)
    assert result.failed == 0
    assert result.attempted >= 8


def test_every_part_stands_there_by_its_name() -> None:
    shown: dict[str, str] = {}
    for _, part, shown_names, _ in (row for row in ROWS if len(row) == 4 and row[0] != "question"):
        for name in re.findall(r"`([^`@]+)(?:@[^`]+)?`", shown_names):
            shown[name] = part.strip("`")
    assert shown == {
        **{name: cls.__name__ for name, cls in named().items()},
        **dict.fromkeys(compression.DTYPES, ""),
    }


def test_values_shown_with_names_are_the_defaults() -> None:
    for name, value in re.findall(r"`(\w+)@([\w.]+)` \|", TEXT):
        tables = (names.PLANS, compression.BY_NAME, names.SCHEDULES, names.EXCHANGES)
        tables = (*tables, names.UPDATES)
        entry = next(table[name] for table in tables if name in table)
        assert getattr(entry.make(), entry.option) == entry.convert(value)


def test_the_table_of_presets_is_what_their_traits_say() -> None:
    yes = {True: "yes", False: "no"}
    expected = []
    for preset in baselines.PRESETS.values():
        made = preset()
        traits = made.traits
        coded = made.compression
        wire = coded if isinstance(coded, str) else type(coded).__name__
        cells = [f"`{preset.__name__}`", f"`{made.plan!r}`", f"`{wire}`"]
        cells += [f"`{type(made.schedule).__name__}`", yes[traits.exact], yes[traits.synchronous]]
        expected.append([*cells, traits.bound])
    found = [row for row in ROWS if len(row) == 7 and row[0] != "preset"]
    lines = "\n".join(f"| {' | '.join(row)} |" for row in expected)
    assert found == expected, f"the table should be\n{lines}"


def test_every_part_of_the_interface_stands_there() -> None:
    for name in parts.__all__:
        cls = getattr(parts, name)
        if issubclass(cls, Part) and not name.endswith("Part"):
            assert f"`{name}`" in TEXT
