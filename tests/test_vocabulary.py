"""Pages, docstrings, comments and errors use standard terms; names do so as well.

``python tests/test_vocabulary.py`` prints the number of findings of each folder. To rewrite a
folder, remove it from `NOT_YET` and fix what the test reports.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

PHRASES = {
    r"whoever|whomever": "the process that, any worker that",
    r"nobody": "no worker, no process",
    r"everybody|everyone": "all workers",
    r"somebody|anybody": "a worker, a process, anyone",
    r"who (is|has|had|was|waits|asks|comes|dies|fails|goes|trains|answers)": "the worker that",
    r"(is|are|was|were|be|been) told": "receives, is notified",
    r"owes?|owed|owing": "has not sent, keeps as a residual",
    r"says?|said|saying": "reports, states, logs",
    r"(goes|go|going|went|gone) on": "continues",
    r"(comes?|came|coming) back": "rejoins, returns",
    r"now and then": "periodically",
    r"by hand": "manually, directly",
    r"anew": "again",
    r"amid|amidst|in the midst": "during, inside",
    r"finds? out|found out": "detects, determines",
    r"looks? (at|for)|looked (at|for)|looking (at|for)": "reads, checks, searches",
    r"hears?|heard": "receives",
    r"speaks?|spoke|spoken": "communicates",
    r"lets? go of": "drops",
    r"puts? right": "corrects",
    r"wants": "requires",
    r"promises?|promised": "guarantees",
    r"to blame|blames?|blamed": "names the failed rank",
    r"forgotten|forgets?": "drops, garbage-collected",
    r"models? parts?": "models diverge",
    r"has to pay|pays? off": "is kept only if it shortens iterations",
    r"cards?": "NIC, interface, GPU, identity",
    r"crowds?": "worker pool",
    r"couriers?": "communication thread",
    r"letters?": "frame, message",
    r"the roll": "the membership log",
    r"attendance": "membership client",
    r"nursery": "background poller",
    r"parting": "graceful shutdown",
    r"astray": "protocol error",
    r"patience": "adaptive timeout",
    r"twins?": "shadow optimizer, duplicate",
    r"holdings": "server shards",
    r"wires": "encodings, compression",
    r"rooms": "folders, connection cache",
    r"riddles?": "plain statement",
}
"""What prose avoids, as regular expressions of whole words, and what to write instead."""

NAMES = {
    "absent": "lost peers",
    "astray": "protocol error",
    "attendance": "membership client",
    "backlog": "unsent gradients",
    "blame": "failure attribution",
    "board": "status table",
    "card": "interface, identity",
    "cards": "interfaces",
    "chance": "RNG state",
    "courier": "communication thread",
    "crowd": "worker pool",
    "entrance": "forward hooks",
    "hear": "await",
    "holdings": "server shards",
    "intake": "backward hooks",
    "keeper": "background poller",
    "letter": "frame",
    "letters": "frames",
    "life": "incarnation",
    "looks": "gradient clipping",
    "meeting": "connection setup",
    "parting": "graceful shutdown",
    "patience": "adaptive timeout",
    "presence": "failure detector",
    "roll": "membership log",
    "rooms": "connection cache",
    "say": "announce",
    "twin": "shadow optimizer",
    "whoever": "requester",
    "wishes": "requests",
}
"""Words that names of modules, classes and functions avoid, and what to name instead."""

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

NOT_YET: dict[str, set[str]] = {
    "src/wingbeat": set(),
    "src/wingbeat_lab": set(),
}
"""Folders and modules of each root that still have findings. Remove one when it is rewritten."""

QUOTED = re.compile(
    r"^```.*?^```|<!-- figures: (.+?) -->.*?<!-- end: .*?-->|<!-- cell: .*?<!-- end -->"
    r"|``.+?``|`[^`]+`|\]\([^)]*\)|https?://\S+",
    re.MULTILINE | re.DOTALL,
)
"""Code, generated figures and links: they are quoted as they are."""

PATTERNS = [(re.compile(rf"\b(?:{bad})\b", re.IGNORECASE), good) for bad, good in PHRASES.items()]


def in_prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the finding of each phrase to replace."""
    plain = QUOTED.sub(lambda found: "\n" * found[0].count("\n"), text)
    for number, line in enumerate(plain.splitlines(), 1):
        for pattern, good in PATTERNS:
            for found in pattern.finditer(line):
                yield number, f"{found[0]!r}: write {good}"


def in_names(path: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the finding of each name to replace."""
    named = [(1, path.stem)]
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            named.append((node.lineno, node.name))
        elif isinstance(node, ast.arg):
            named.append((node.lineno, node.arg))
    for number, name in named:
        for word in re.findall(r"[A-Z]?[a-z]+", name):
            if good := NAMES.get(word.lower()):
                yield number, f"{name}: name it by {good}"


def in_source(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the finding of each comment, text and name to replace."""
    text = path.read_text(encoding="utf-8")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            for number, finding in in_prose(token.string):
                yield token.start[0] + number - 1, finding
    yield from in_names(path, ast.parse(text))


def of(path: Path) -> list[str]:
    """The findings of a file, with their places."""
    found = in_source(path) if path.suffix == ".py" else in_prose(path.read_text(encoding="utf-8"))
    return [f"{path.relative_to(ROOT)}:{number}: {finding}" for number, finding in found]


def allowed(path: Path, root: str) -> bool:
    """Whether a file, or a folder that contains it, is in the allowance of its root."""
    inside = path.relative_to(ROOT / root)
    return any(str(each) in NOT_YET[root] for each in (inside, *inside.parents))


SOURCES = [
    path
    for root in NOT_YET
    for path in sorted((ROOT / root).rglob("*.py"))
    if not allowed(path, root)
]


@pytest.mark.parametrize(
    "path", [pytest.param(path, id=str(path.relative_to(ROOT))) for path in PAGES + SOURCES]
)
def test_prose_and_names_use_standard_terms(path: Path) -> None:
    found = of(path)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("Whoever waits is told.", 2),
        ("Nobody goes on.", 2),
        ("`Whoever` is quoted.", 0),
        ("```\nnobody\n```\nA card", 1),
        ("<!-- figures: a -->\nnobody\n<!-- end: a -->", 0),
        ("[a link](roll.md) to [letters](crowd.md)", 1),
        ("The server applies no flow control.", 0),
    ],
)
def test_a_phrase_is_found_outside_of_quotations_only(text: str, count: int) -> None:
    assert len(list(in_prose(text))) == count


def test_a_name_is_found_by_its_words() -> None:
    code = "class CrowdOfOwners:\n    def hear(self, patience, shear): ...\n"
    found = [finding for _, finding in in_names(Path("roll.py"), ast.parse(code))]
    assert [each.split(":")[0] for each in found] == ["roll", "CrowdOfOwners", "hear", "patience"]


if __name__ == "__main__":
    counts: Counter[str] = Counter()
    for each in NOT_YET:
        for source in sorted((ROOT / each).rglob("*.py")):
            parts = source.relative_to(ROOT / each).parts
            depth = 2 if parts[0] == "methods" else 1
            counts["/".join([each, *parts[:depth]])] += len(of(source))
    for folder, number in sorted(counts.items()):
        print(f"{number:5} {folder}")
