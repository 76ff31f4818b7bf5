"""The measured figures of the documentation: measure them, set them into the pages, check them.

    python tools/figures.py list
    python tools/figures.py measure collectives overhead    (the whole commands; can take hours)
    python tools/figures.py pages                           (writes the pages anew)
    python tools/figures.py check                           (exit code 1 if a page differs)

``docs/results/commands.toml`` names the figures: the command that measures each, a reduced form of
it for tests, and the packages of ``src/wingbeat`` that it exercises. ``measure`` writes
``docs/results/NAME.json``: the command, date, duration, commit, versions, machine and load, a
digest of each exercised package, the tables as printed, and all that the command measured. Between
``<!-- figures: NAME -->`` and ``<!-- end: NAME -->`` a page has what ``pages`` makes of that file.
If an exercised package has changed since, the page says so.
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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

from wingbeat.bench import machine
from wingbeat.bench.printed import Printed

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
KEPT = DOCS / "results"
COMMANDS = KEPT / "commands.toml"
NATIVE = "native"
"""Stands for the C++ sources among the exercised packages."""

_PART = r"<!-- figures: ([\w-]+) -->\n(.*?)<!-- end: \1 -->"


@dataclass(frozen=True)
class Figure:
    """One entry of ``commands.toml``.

    Attributes:
        name: of the entry and of its JSON file.
        command: what measures it, as a user types it, without ``--json``.
        reduced: the same with less of everything, for tests; seconds, not hours.
        exercises: packages of ``src/wingbeat``, or ``native``, whose changes make it stale.
    """

    name: str
    command: str
    reduced: str
    exercises: tuple[str, ...]

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
        if set(entry) != {"command", "reduced", "exercises"}:
            sys.exit(f"{COMMANDS.name}: {name}: needs command, reduced and exercises only")
        if missing := [each for each in entry["exercises"] if not sources(each)]:
            sys.exit(f"{COMMANDS.name}: {name}: no such package: {', '.join(missing)}")
        made[name] = Figure(name, entry["command"], entry["reduced"], tuple(entry["exercises"]))
    return made


def sources(package: str) -> list[Path]:
    """Return the source files of a package, or of a module, of ``src/wingbeat``; or C++ ones."""
    if package == NATIVE:
        return sorted(p for p in (ROOT / NATIVE).rglob("*") if p.suffix in {".cpp", ".h"})
    folder = ROOT / "src/wingbeat" / package
    return sorted(folder.rglob("*.py")) or [p for p in [folder.with_suffix(".py")] if p.exists()]


def digest(package: str) -> str:
    """Return a digest of what a package does: comments, docstrings and layout do not change it."""
    made = hashlib.sha256()
    for file in sources(package):
        text = file.read_text(encoding="utf-8")
        made.update(file.relative_to(ROOT).as_posix().encode())
        made.update((_code(text) if file.suffix == ".py" else text).encode())
    return made.hexdigest()[:16]


def _code(text: str) -> str:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if not _is_text(each)]  # type: ignore[attr-defined]
    return ast.unparse(tree)


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
    about, stolen, began = machine.describe(), machine.StolenShare(), time.monotonic()
    print(f"$ {figure.command}", flush=True)
    code = subprocess.run(figure.words(figure.command, raw), cwd=ROOT, check=False).returncode
    if not raw.exists():
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
        "machine": about | {"load_after": os.getloadavg()[0], "stolen_share": stolen()},
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
    if spoiled := machine.disturbed(about):
        lines[-1] += f" **{spoiled[0].upper()}{spoiled[1:]}.**"
    if stale := changed(kept):
        names = ", ".join(f"`{each}`" for each in stale)
        lines[-1] += f" **Stale: {names} changed since.**"
    for table in kept["tables"]:
        lines += ["", Printed.from_json(table).markdown()]
    return "\n".join(lines) + "\n"


def pages() -> Iterator[tuple[Path, str, str]]:
    """Yield each page that has figures, its text, and the text that it has to have.

    Raises:
        SystemExit: a page asks for figures that are not kept.
    """
    for page in sorted([ROOT / "README.md", *DOCS.rglob("*.md")]):
        text = page.read_text(encoding="utf-8")
        made, count = re.subn(_PART, functools.partial(_part, page), text, flags=re.DOTALL)
        if count:
            yield page, text, made


def _part(page: Path, found: re.Match[str]) -> str:
    name = found[1]
    file = KEPT / f"{name}.json"
    if not file.exists():
        sys.exit(f"{page.name}: {name}: measure it first: python tools/figures.py measure {name}")
    text = shown(json.loads(file.read_text(encoding="utf-8")))
    return f"<!-- figures: {name} -->\n\n{text}\n<!-- end: {name} -->"


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
