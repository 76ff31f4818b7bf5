"""The measured figures of the documentation: measure them, set them into the pages, check them.

    python tools/figures.py list
    python tools/figures.py measure collectives overhead    (the whole commands; can take hours)
    python tools/figures.py pages                           (writes the pages anew)
    python tools/figures.py check                           (exit code 1 if a page differs)

``docs/results/commands.toml`` names the figures: the command that measures each, a reduced form of
it for tests, and the packages of ``src/wingbeat`` and ``src/wingbeat_lab`` that it exercises.
``measure`` writes ``docs/results/NAME.json``: the command, date, duration, commit, versions,
machine and load, a digest of each exercised package, the tables as printed, and all that the
command measured. Between ``<!-- figures: NAME -->`` and ``<!-- end: NAME -->`` a page has what
``pages`` makes of that file. If an exercised package has changed since, the page says so. What is
not measured yet stands there as its command and *to be measured*, with what was wrong with an
earlier figure, if anything was (``withdrawn`` in ``commands.toml``).

``<!-- figures: NAME; TABLE -->`` has one of its tables only, counted from 0, or from -1 at the end.
One cell of a kept table stands between ``<!-- cell: NAME; TABLE; ROW; COLUMN -->`` and
``<!-- end -->``: TABLE counts from 0, ROW is the row's first cell, COLUMN a heading.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import functools
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

from wingbeat_lab.bench import machine
from wingbeat_lab.bench.table import Printed

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
KEPT = DOCS / "results"
COMMANDS = KEPT / "commands.toml"
NATIVE = "native"
"""Stands for the C++ sources among the exercised packages."""
PACKAGES = ("wingbeat", "wingbeat_lab")

_PART = r"<!-- figures: ([\w-]+)(?:; (-?\d+))? -->\n(.*?)<!-- end: \1 -->"
_CELL = r"<!-- cell: ([\w-]+); (\d+); ([^;>]+); ([^;>]+) -->(.*?)<!-- end -->"
UNMEASURED = "to be measured"


@dataclass(frozen=True)
class Figure:
    """One entry of ``commands.toml``.

    Attributes:
        name: of the entry and of its JSON file.
        command: what measures it, as a user types it, without ``--json``.
        reduced: the same with less of everything, for tests; seconds, not hours.
        exercises: packages below `PACKAGES`, or ``native``, whose changes make it stale.
        withdrawn: what was wrong with an earlier figure, until this is measured; may be empty.
    """

    name: str
    command: str
    reduced: str
    exercises: tuple[str, ...]
    withdrawn: str = ""

    def words(self, command: str, json_file: Path) -> list[str]:
        """Return the words of a command of this entry that writes its figures to a file."""
        program, *words = shlex.split(command)
        beside = Path(sys.executable).parent
        found = sys.executable if program == "python" else str(beside / program)
        return [found, *words, "--json", str(json_file)]


def figures() -> dict[str, Figure]:
    """Return all entries by name.

    Raises:
        SystemExit: an entry lacks a key or has one that is not known, or names no package.
    """
    made = {}
    for name, entry in tomllib.loads(COMMANDS.read_text(encoding="utf-8")).items():
        if set(entry) - {"withdrawn"} != {"command", "reduced", "exercises"}:
            sys.exit(
                f"{COMMANDS.name}: {name}: needs command, reduced and exercises; "
                "allowed beside them: withdrawn"
            )
        if missing := [each for each in entry["exercises"] if not sources(each)]:
            sys.exit(f"{COMMANDS.name}: {name}: no such package: {', '.join(missing)}")
        made[name] = Figure(
            name,
            entry["command"],
            entry["reduced"],
            tuple(entry["exercises"]),
            entry.get("withdrawn", ""),
        )
    return made


def sources(package: str) -> list[Path]:
    """Return the source files of a package, or of a module, below `PACKAGES`; or C++ ones."""
    if package == NATIVE:
        return sorted(p for p in (ROOT / NATIVE).rglob("*") if p.suffix in {".cpp", ".h"})
    folders = [ROOT / "src" / top / package for top in PACKAGES]
    return [
        file
        for folder in folders
        for file in [folder.with_suffix(".py"), *sorted(folder.rglob("*.py"))]
        if file.exists()
    ]


def digest(package: str) -> str:
    """Return a digest of what a package does.

    Comments, docstrings, layout and the annotations of attributes do not change it.
    """
    made = hashlib.sha256()
    for file in sources(package):
        text = file.read_text(encoding="utf-8")
        made.update(file.relative_to(ROOT).as_posix().encode())
        made.update((_code(text) if file.suffix == ".py" else text).encode())
    return made.hexdigest()[:16]


@functools.cache  # figures share packages, and pages have many figures
def _code(text: str) -> str:
    tree = _Plain().visit(ast.parse(text))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if not _is_text(each)]  # type: ignore[attr-defined]
    return ast.unparse(tree)


class _Plain(ast.NodeTransformer):
    """``self.x: int = 1`` is ``self.x = 1``."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None or not isinstance(node.target, ast.Attribute):
            return node
        return ast.copy_location(ast.Assign([node.target], node.value), node)


def _is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def measure(figure: Figure) -> int:
    """Run the whole command and keep what it found; return its exit code.

    The command's own exit code 1 means that a limit is missed. Its figures are kept all the same.
    """
    file = KEPT / f"{figure.name}.json"
    raw = file.with_suffix(".measured")
    raw.unlink(missing_ok=True)
    about, others, began = machine.describe(), machine.Disturbances(), time.monotonic()
    print(f"$ {figure.command}", flush=True)
    code = subprocess.run(
        figure.words(figure.command, raw.relative_to(ROOT)), cwd=ROOT, check=False
    ).returncode
    if code not in (0, 1) or not raw.exists():
        raw.unlink(missing_ok=True)  # some benchmarks write what they have after each part
        print(f"{figure.name}: no figures: the command ended with {code}", file=sys.stderr)
        return code or 1
    report = json.loads(raw.read_text(encoding="utf-8"))
    raw.unlink()
    if not isinstance(report, dict) or not report.get("tables"):
        print(f"{figure.name}: the command's JSON has no tables", file=sys.stderr)
        return 1
    kept = {
        "command": figure.command,
        "exit_code": code,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "seconds": round(time.monotonic() - began),
        "commit": _git("rev-parse", "--short", "HEAD"),
        "uncommitted": bool(_git("status", "--porcelain", "--", "src", "native", "benchmarks")),
        "versions": machine.versions(),
        "machine": about | {"load_after": os.getloadavg()[0]} | others(),
        "exercises": {each: digest(each) for each in figure.exercises},
        "tables": report.pop("tables"),
        "report": report,
    }
    file.write_text(written(kept), encoding="utf-8")
    print(f"{figure.name}: {file.relative_to(ROOT)}")
    return code


def written(kept: Mapping[str, Any]) -> str:
    """Return a kept measurement as JSON, each of its parts on a line of its own."""
    lines = (f" {json.dumps(name)}: {json.dumps(part)}" for name, part in kept.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def changed(kept: Mapping[str, Any]) -> list[str]:
    """Return the exercised packages whose code is not what it was when this was measured."""
    return [each for each, was in kept["exercises"].items() if digest(each) != was]


def shown(kept: Mapping[str, Any]) -> str:
    """Return what a page has of one kept measurement."""
    about = kept["machine"]
    versions = ", ".join(f"{name} {kept['versions'][name]}" for name in ("torch", "python"))
    lines = [
        f"`{kept['command']}`",
        "",
        f"{kept['date']}, commit {kept['commit']}{' with changes' * kept['uncommitted']}, "
        f"{about['cores']} cores ({about['cpu']}), {versions}; load {about['load_before']:.1f} "
        f"before, {about['load_after']:.1f} after; {kept['seconds']} s in all.",
    ]
    if kept["exit_code"]:
        lines[-1] += " The command names limits that were missed."
    for each in machine.disturbed(about):
        lines[-1] += f" **{each[0].upper()}{each[1:]}.**"
    if stale := changed(kept):
        names = ", ".join(f"`{each}`" for each in stale)
        lines[-1] += f" **Stale: {names} changed since.**"
    for table in kept["tables"]:
        lines += ["", Printed.from_json(table).markdown()]
    return "\n".join(lines) + "\n"


def pages() -> Iterator[tuple[Path, str, str]]:
    """Yield each page that has figures, its text, and the text that it has to have.

    Raises:
        SystemExit: a page names figures, or a part of them, that there are not.
    """
    known = functools.cache(figures)
    for page in sorted([ROOT / "README.md", *DOCS.rglob("*.md")]):
        text = page.read_text(encoding="utf-8")
        part, cell = (functools.partial(each, page, known) for each in (_part, _cell))
        made, parts = re.subn(_PART, part, text, flags=re.DOTALL)
        made, cells = re.subn(_CELL, cell, made)
        if parts + cells:
            yield page, text, made


Known = Callable[[], Mapping[str, Figure]]
"""Returns all entries by name: read only if a page needs them."""


def _part(page: Path, known: Known, found: re.Match[str]) -> str:
    name, number, _ = found.groups()
    kept = _found(page, known, name)
    if isinstance(kept, Figure):
        text = f"`{kept.command}`\n\n**To be measured.** {kept.withdrawn}".rstrip() + "\n"
    else:
        only = kept["tables"] if number is None else [_table(page, kept, name, int(number))]
        text = shown(kept | {"tables": only})
    head = found[0].split("\n", 1)[0]
    return f"{head}\n\n{text}\n<!-- end: {name} -->"


def _cell(page: Path, known: Known, found: re.Match[str]) -> str:
    name, number, row, column, _ = found.groups()
    kept = _found(page, known, name)
    if isinstance(kept, Figure):
        text = UNMEASURED
    else:
        table = Printed.from_json(_table(page, kept, name, int(number)))
        rows = {each[0]: each for each in table.rows}
        where = f"{page.name}: {name}"
        if row not in rows:
            sys.exit(f"{where}: no row {row!r} in table {number}; rows: {'; '.join(rows)}")
        if column not in table.columns:
            sys.exit(f"{where}: no column {column!r}; columns: {'; '.join(table.columns)}")
        text = rows[row][table.columns.index(column)] or "no figure"
        text += " (stale)" * bool(changed(kept))
    return f"<!-- cell: {name}; {number}; {row}; {column} -->{text}<!-- end -->"


def _table(page: Path, kept: Mapping[str, Any], name: str, number: int) -> Any:
    """Return one of the kept tables, counted from 0, or from -1 at the end."""
    if not -len(kept["tables"]) <= number < len(kept["tables"]):
        sys.exit(f"{page.name}: {name}: no table {number}; there are {len(kept['tables'])}")
    return kept["tables"][number]


def _found(page: Path, known: Known, name: str) -> dict[str, Any] | Figure:
    """Return what is kept of a figure; its entry if it is not measured yet."""
    file = KEPT / f"{name}.json"
    if file.exists():
        kept: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return kept
    if name not in known():
        sys.exit(f"{page.name}: {name}: no such figure in {COMMANDS.name}")
    return known()[name]


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="list|measure|pages|check")
    verbs.add_parser("list", help="name all figures, their date, and whether they are stale")
    one = verbs.add_parser("measure", help="run whole commands and keep what they measure")
    known = figures()
    one.add_argument("names", nargs="+", choices=sorted(known), metavar="NAME")
    verbs.add_parser("pages", help="write the pages anew")
    verbs.add_parser("check", help="exit code 1 if a page is not what `pages` would write")
    args = parser.parse_args()
    if args.verb == "measure":
        return max(measure(known[name]) for name in args.names)
    if args.verb == "list":
        for name, figure in known.items():
            print(f"{name:24} {_state(name)}  {figure.command}")
        return 0
    differing = [(page, made) for page, text, made in pages() if made != text]
    for page, made in differing:
        print(f"{page.relative_to(ROOT)}: {'written' if args.verb == 'pages' else 'differs'}")
        if args.verb == "pages":
            page.write_text(made, encoding="utf-8")
    return int(args.verb == "check" and bool(differing))


def _state(name: str) -> str:
    file = KEPT / f"{name}.json"
    if not file.exists():
        return "not measured"
    kept = json.loads(file.read_text(encoding="utf-8"))
    return f"{kept['date']}{' stale' if changed(kept) else ''}"


if __name__ == "__main__":
    sys.exit(main())
