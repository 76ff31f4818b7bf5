"""The verbs are exactly the documented ones, and a verb that does not exist is one line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from helpers.verbs import wingbeat
from wingbeat.cli.main import app

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"


def _documented() -> set[str]:
    rows = re.findall(r"^\| `wingbeat ([a-z ]+)` \| \S", DOCS.read_text(encoding="utf-8"), re.M)
    return set(rows)


def _verbs(command: Any, prefix: str = "") -> set[str]:
    below = getattr(command, "commands", None)
    if below is None:
        return {prefix}
    return {verb for name in below for verb in _verbs(below[name], f"{prefix} {name}".strip())}


def test_verbs_are_the_documented_ones() -> None:
    assert _verbs(typer.main.get_command(app)) == _documented()


def test_the_documentation_lists_verbs_at_all() -> None:
    lab = {"lab run", "lab stats", "lab doctor"}
    assert (
        lab | {"bench", "demo", "doctor", "plan", "probe", "profile", "show", "store", "top"}
        == _documented()
    )


@pytest.mark.parametrize(
    ("args", "value", "nearest"),
    [(["benhc"], "benhc", "bench"), (["lab", "docter"], "docter", "doctor")],
)
def test_an_unknown_verb_is_one_line_and_exit_2(args: list[str], value: str, nearest: str) -> None:
    done = wingbeat(*args)
    assert done.returncode == 2
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert value in line
    assert nearest in line


@pytest.mark.parametrize("verb", sorted(_documented()))
def test_every_verb_explains_itself(verb: str) -> None:
    done = wingbeat(*verb.split(), "--help")
    assert done.returncode == 0
    assert "--help" in done.stdout
    assert len(done.stdout.splitlines()) > 5


def test_starting_the_command_line_does_not_import_torch() -> None:
    code = "import sys, wingbeat.cli.main; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_without_other_packages_the_verbs_are_those_ofwingbeat() -> None:
    code = (
        "import importlib.metadata, sys; importlib.metadata.entry_points = lambda group: ();"
        "from wingbeat.cli.main import app;"
        "print([each.name for each in app.registered_commands], 'wingbeat_lab' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (
        done.stdout.strip()
        == "['doctor', 'plan', 'probe', 'profile', 'show', 'store', 'top'] False"
    )
