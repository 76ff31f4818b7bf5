"""``docs/figures-of-the-papers.md``: no figure is left out, commands are right, figures copied."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from helpers.scripts import FOLDER, benchmark
from wingbeat.cli.main import app
from wingbeat_lab.bench.config import BenchConfig

DOCS = FOLDER.parent / "docs"
PAGE = (DOCS / "figures-of-the-papers.md").read_text(encoding="utf-8")
SECTIONS = {part.split("\n")[0]: part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]}
COMMANDS = sorted(set(re.findall(r"`((?:python benchmarks/|wingbeat )[^`]+)`", PAGE)))
ROMAN = {"I": 1, "II": 2, "III": 3, "IV": 4, "V": 5, "VI": 6}
# How many figures and tables each paper has.
PAPERS = {
    "DeAR": (11, 2),
    "OMGS-SGD": (4, 6),
    "Canary": (27, 3),
    "Geryon": (10, 4),
    "Ripples": (20, 0),
}


class Parsed(Exception):
    """The command line was understood; nothing is run."""


def numbers(kind: str, section: str) -> set[int]:
    """The numbers of all ``Figs. 1 to 3, 5`` or ``Tables II, III`` in the first columns."""
    found: set[int] = set()
    for line in section.splitlines():
        first = line.split("|")[1] if line.startswith("|") else ""
        for words in re.findall(rf"{kind}s?\.? ((?:\w+(?:, | to )?)+)", first):
            for item in words.split(", "):
                ends = [ROMAN.get(word) or int(word) for word in item.split(" to ")]
                found |= set(range(ends[0], ends[-1] + 1))
    return found


def slug(title: str) -> str:
    """What a heading is called in a link."""
    return re.sub(r"[^\w\s-]", "", title.lower()).replace(" ", "-")


@pytest.mark.parametrize("paper", PAPERS)
def test_every_figure_and_table_has_a_row(paper: str) -> None:
    figures, tables = PAPERS[paper]
    assert numbers("Fig", SECTIONS[paper]) == set(range(1, figures + 1))
    assert numbers("Table", SECTIONS[paper]) == set(range(1, tables + 1))


@pytest.mark.parametrize("paper", PAPERS)
def test_every_row_says_something_in_each_column_but_the_command(paper: str) -> None:
    rows = [line.split("|")[1:-1] for line in SECTIONS[paper].splitlines() if line[:1] == "|"]
    assert {len(row) for row in rows} == {5}
    for which, shows, _, ours, theirs in rows[2:]:
        assert shows.strip()
        assert ours.strip()
        assert theirs.strip() or "Table" in which


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("python ")])
def test_benchmarks_understand_their_commands(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, script, *words = shlex.split(command)
    parse = argparse.ArgumentParser.parse_args

    def only_parse(self: argparse.ArgumentParser, *args: Any, **options: Any) -> None:
        parse(self, *args, **options)
        raise Parsed

    with benchmark(Path(script).stem) as module:
        monkeypatch.setattr(sys, "argv", [script, *words])
        monkeypatch.setattr(argparse.ArgumentParser, "parse_args", only_parse)
        with pytest.raises(Parsed):
            module.main()


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("wingbeat ")])
def test_the_program_understands_its_commands(command: str) -> None:
    _, verb, *words = shlex.split(command)
    group: Any = typer.main.get_command(app)
    context = group.commands[verb].make_context(verb, words)
    if verb == "bench":
        given = context.params
        rows = tuple(given["strategies"] or ("ddp",))
        BenchConfig(lab=given["lab"], model=given["model"], strategies=rows).check()


def test_there_are_commands_of_both_kinds() -> None:
    assert sum(command.startswith("python ") for command in COMMANDS) > 30
    assert sum(command.startswith("wingbeat ") for command in COMMANDS) > 5


def test_links_lead_to_headings_that_are_there() -> None:
    for page, heading in set(re.findall(r"\]\(([\w/-]+\.md)(?:#([\w-]+))?\)", PAGE)):
        text = (DOCS / page).read_text(encoding="utf-8")
        titles = [line.lstrip("# ") for line in text.splitlines() if line.startswith("#")]
        assert not heading or heading in map(slug, titles), f"{page}#{heading}"


def test_links_to_results_show_no_number_that_was_typed() -> None:
    links = re.findall(r"\[([^\]]+)\]\(results\.md#([\w-]+)\)", PAGE)
    assert len(links) > 30
    assert not [said for said, _ in links if re.search(r"\d+\.\d+", said)]


@pytest.mark.parametrize(
    "wrong",
    [
        "python benchmarks/dear.py --rates fats",
        "python benchmarks/dear_figures.py --figures 8",
        "python benchmarks/omgs.py --pgn out/omgs.png",
    ],
)
def test_a_wrong_command_would_be_found(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        test_benchmarks_understand_their_commands(wrong, monkeypatch)
