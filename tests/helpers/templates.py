"""What the code says when something fails: the texts that it raises, with ``…`` for each value."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from wingbeat import errors

SOURCE = Path(__file__).parents[2] / "src"
VALUE = "…"
_SEVERAL = re.compile(f"{VALUE}+")
_OF_A_LOG = re.compile(r"%[.\d]*[dgrs]")
ERRORS = {
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, errors.WingbeatError)
}


@dataclass(frozen=True)
class Template:
    """A text in the source: ``error`` is the class that is made of it, empty if none is there."""

    file: str
    line: int
    error: str
    text: str

    @property
    def room(self) -> str:
        """The folder or module right below its package."""
        return self.file.split("/")[1].removesuffix(".py")

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def fixed(self) -> int:
        """How many characters stand in the source."""
        return len(self.text.replace(VALUE, "").strip())


def text_of(node: ast.AST) -> str:
    """A text with ``…`` for what is put in; only that for what is no text."""
    match node:
        case ast.Constant(value=str(value)):
            return _OF_A_LOG.sub(VALUE, value)
        case ast.JoinedStr(values=values):
            return "".join(text_of(value) for value in values)
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return text_of(left) + text_of(right)
    return VALUE


def texts(tree: ast.AST) -> Iterator[ast.expr]:
    """All texts that are no part of a longer one, and no docstrings."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.Expr(value=ast.Constant()):
                continue
            case ast.JoinedStr() | ast.Constant(value=str()) | ast.BinOp(op=ast.Add()):
                yield node
            case _:
                yield from texts(node)


def raised(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Each call that makes an error of wingbeat's, as (class, its text)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            name = getattr(node.func, "id", "")
            if name in ERRORS:
                yield name, node.args[0]


@cache
def templates() -> tuple[Template, ...]:
    """All texts of the source."""
    found = []
    for path in sorted(SOURCE.glob("wingbeat*/**/*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        made = {id(node): name for name, node in raised(tree)}
        file = path.relative_to(SOURCE).as_posix()
        for node in texts(tree):
            error = made.get(id(node), "")
            text = _SEVERAL.sub(VALUE, text_of(node))
            found.append(Template(file, node.lineno, error, text))
    return tuple(found)
