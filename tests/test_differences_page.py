"""``docs/how-to/differences.md`` says in which words things are refused: all, and the code's."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.templates import VALUE, templates

ROOT = Path(__file__).parents[1]
PAGE = " ".join((ROOT / "docs/how-to/differences.md").read_text(encoding="utf-8").split())
PACKAGES = ("engine", "engine/gradients", "engine/updates")

ELSEWHERE = {"checkpoint.py", "compression.py"}
"""What is refused there is about saved shards and codecs, which have pages of their own."""

RAISED = {"UsageError", "MismatchError", "UnevenBatchesError"}
LONGEST = 60
"""Characters of each message that the page must have in one piece, at most."""

SHORTEST = 25
"""Characters of a clause of a quotation that the source must have in one piece, at least."""

ASSEMBLED = {
    "optimizer.state with shard_optimizer",
    "load_state_dict() on rank",
    "and the torch job of this replica ranks",
    "parameter '0.weight' is sharded as Shard(dim=0) on a mesh of shape (2,) by fully_shard()",
    "or pass the model without it",
}
"""Clauses that the source makes of several texts, and of an example with its values."""


def pieces(node: ast.expr) -> list[str]:
    """The fixed parts of a message: what stands between values."""
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.JoinedStr):
        return [str(part.value) for part in node.values if isinstance(part, ast.Constant)]
    if isinstance(node, ast.BinOp):
        return pieces(node.left) + pieces(node.right)
    return []


def messages() -> Iterator[tuple[str, list[str]]]:
    """Where something is refused, and the fixed parts of what is said."""
    source = ROOT / "src/wingbeat"
    paths = [path for each in PACKAGES for path in (source / each).glob("*.py")]
    paths += [source / "methods/model_averaging" / name for name in ("flat.py", "local.py")]
    for path in sorted(paths):
        if path.name in ELSEWHERE:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in RAISED and node.args:
                found = [piece for piece in pieces(node.args[0]) if piece.strip()]
                if found:
                    yield f"{path.name}:{node.lineno}", found


@pytest.mark.parametrize(("where", "found"), [pytest.param(*m, id=m[0]) for m in messages()])
def test_what_is_refused_stands_there_in_its_own_words(where: str, found: list[str]) -> None:
    longest = " ".join(max(found, key=len).split())
    assert longest[:LONGEST].strip() in PAGE, f"{where}: {longest!r} is not on the page"


def test_there_are_messages_to_compare() -> None:
    assert len(list(messages())) > 20


def clauses() -> Iterator[str]:
    """What is quoted in the second column of the tables of what is refused."""
    refused = False
    for line in (ROOT / "docs/how-to/differences.md").read_text(encoding="utf-8").splitlines():
        refused = line.startswith("| refused |") or (refused and line.startswith("|"))
        text = line.rpartition(" | ")[2] if refused else ""
        for quoted in re.findall(r"`([^`]+)`", text):
            for clause in re.split(rf"[:;,](?= |$)|{VALUE}", quoted):
                if len(clause.strip()) >= SHORTEST and clause.strip() not in ASSEMBLED:
                    yield clause.strip()


def test_what_is_quoted_is_said_by_the_code() -> None:
    said = "\n".join(" ".join(each.text.split()) for each in templates())
    assert [clause for clause in clauses() if clause not in said] == []


def test_there_are_quotations_to_compare() -> None:
    assert len(list(clauses())) > 200
    assert all(each in PAGE for each in ASSEMBLED)
