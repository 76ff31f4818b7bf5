"""``docs/how-to/troubleshooting.md`` quotes errors: the code says each, and no kind is left out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.templates import ERRORS, VALUE, Template, templates

TEXT = (Path(__file__).parents[1] / "docs/how-to/troubleshooting.md").read_text(encoding="utf-8")
PLAIN = re.sub(r"^```.*?^```$", "", TEXT, flags=re.MULTILINE | re.DOTALL)
INTRODUCTION, _, TABLES = PLAIN.partition("## Start: launcher and script")

OF_DATA = re.compile(r"malformed|\bsent?\b|\bsends\b|brought|have come|has come|damaged")
"""What another worker has sent: nearly a hundred messages with one reason, told at the top."""

SHORTEST = 12
"""Fixed characters that a message needs to be one, and a quotation to be of no other by chance."""


def quotations() -> Iterator[str]:
    """What stands in backticks in the first column of tables of errors, and before them."""
    prose = re.sub(r"^```.*?^```$", "", INTRODUCTION, flags=re.MULTILINE | re.DOTALL)
    early = re.findall(r"`([^`]+)`", prose)
    yield from (each for each in early if VALUE in each and each != VALUE)
    within = False
    for line in TABLES.splitlines():
        if not line.startswith("|"):
            within = False
        elif line.startswith("| error text |"):
            within = True
        elif within and not line.startswith("|---"):
            yield from re.findall(r"`([^`]+)`", line.partition(" | ")[0])


def fixed(text: str) -> int:
    return len(text.replace(VALUE, "").strip())


QUOTED = list(quotations())


def is_shown(template: Template) -> bool:
    return any(quoted in template.text for quoted in QUOTED)


@pytest.mark.parametrize("quoted", QUOTED)
def test_what_is_quoted_is_said_by_the_code(quoted: str) -> None:
    assert fixed(quoted) >= SHORTEST, f"{quoted!r} would be found anywhere"
    assert any(quoted in each.text for each in templates()), f"nothing in src says {quoted!r}"


def test_there_is_much_to_compare() -> None:
    """Neither side is read wrongly: whole tables, and nearly all errors of the source."""
    assert len(QUOTED) > 120
    assert sum(bool(each.error) for each in templates()) > 550


def test_every_class_is_told_of() -> None:
    table = set(re.findall(r"^\| `(\w+Error)` \|", TEXT, re.MULTILINE))
    assert table == ERRORS


def test_every_error_that_comes_while_it_runs_has_its_row() -> None:
    """A wrong value says what is allowed; what others did is not explained by one line."""
    missing = [
        f"{each.where}: {each.text}"
        for each in templates()
        if each.error in ERRORS - {"UsageError"}
        and len(re.findall(r"[a-z]{3,}", each.text)) > 2  # else it passes on what was said before
        and not OF_DATA.search(each.text)
        and not is_shown(each)
    ]
    assert missing == []


def test_every_room_that_refuses_has_a_row() -> None:
    rooms = {each.room for each in templates() if each.error and "allowed" not in each.text}
    told = {each.room for each in templates() if each.error and is_shown(each)}
    assert sorted(rooms - told) == []


def test_what_is_raised_is_one_line() -> None:
    assert [each.where for each in templates() if each.error and "\n" in each.text] == []
