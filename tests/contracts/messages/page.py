"""Writes docs/developers/wire.md from the declared records."""

from __future__ import annotations

import enum
import inspect
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from wingbeat.schema import Length, Range, Table, table_of

from .declared import FRAMES, HEADERS, MAILBOXES, TEXTS, Group

PAGE = Path(__file__).parents[3] / "docs/developers/wire.md"

_HEAD = """# Messages of the methods

Messages between processes are declared as records (`wingbeat/schema.py`): a dataclass or
NamedTuple whose annotations are types and limits. Encoding, decoding and all checks follow from
the declaration, and so does this page. A message with a wrong kind, value, length or size raises
`MalformedMessage`, which names the field and the value; nothing is allocated for a length that
the message cannot contain.

A record is sent as *words*, whole numbers from 0. A number that may be -1 is sent as its value plus
1; a flag is 0 or 1. Items are preceded by their number, unless that is a size known to both sides,
such as `workers`. A mask is sent in words of 32 bits, preceded by their number.

This page is generated, and a test compares it with the records. Write it again with
`PYTHONPATH=tests .venv/bin/python -m contracts.messages.page`.
"""

_MAILBOX = """
## {title}

`{place}`. These are messages of a [mailbox](messages.md): the first four words
are the ids, further words are the payload of a message that has no other.
"""

_FRAMES = """
## {title}

`{place}`. Messages are sent as frames, little-endian: 4 bytes with the width of
a word (4 or 8 bytes), 4 bytes with the number of words, 8 bytes with the bytes of the payload,
the words, the payload. Several frames may be in one part; a payload may continue in later parts.
The words begin with a `FrameHeader`.
"""

_HEADERS = """
## Headers
"""

_TEXTS = """
## Texts

These records are JSON: an object for a dataclass, and a list of the values for a NamedTuple. A
missing field of an object has its default value; without one, the object is malformed. Unknown
fields are ignored.
"""


def described(table: Table) -> str:
    """The type and the limits of a field."""
    limits = table.limits
    if table.form == "number":
        return _range(table.type, limits)
    if table.form == "mask":
        return f"mask of `{limits.size}`"
    if table.form == "items":
        return _items(table, limits)
    if table.form == "record":
        if table.type is tuple:
            return f"({', '.join(map(described, table.parts.values()))})"
        return f"`{table.type.__name__}`"
    if table.form == "union":
        return " or ".join(map(described, table.parts.values()))
    if limits is not None:
        return f"text, {limits.most} characters"
    return {Any: "any", str: "text", dict: "object"}.get(table.type, "null")


def _range(kind: Any, limits: Range) -> str:
    if kind is bool:
        return "flag"
    if issubclass(kind, enum.Enum):
        return ", ".join(f"{each.value} {each.name}" for each in kind)
    least, last = (_number(limits.least, 0), _number(limits.end, 1))
    whole = "real, " if kind is float else ""
    return f"{whole}{least} to {last}{limits.unit and ' '}{limits.unit}"


def _number(value: float | str, less: int) -> str:
    if isinstance(value, str):
        return f"`{value}` - 1"
    power = int(abs(value)).bit_length() - 1
    if power > 16 and abs(value) == 1 << power and less:
        return f"2^{power} - 1"
    return f"{value:g}" if isinstance(value, float) else str(value - less)


def _items(table: Table, limits: Length) -> str:
    count = f"`{limits.size}`" if limits.size else f"{limits.least} to {limits.most}"
    item = described(table.parts["item"])
    return f"{count} of ({item}){', increasing' if limits.increasing else ''}"


def meanings(record: type) -> dict[str, str]:
    """The meaning of each field, from the docstring."""
    text = inspect.getdoc(record) or ""
    listed = text.partition("Attributes:")[2]
    fields = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", listed, re.MULTILINE)
    return {name: " ".join(meaning.replace("``", "`").split()) for name, meaning in fields}


def rows(record: type) -> Iterator[str]:
    table, known = table_of(record), meanings(record)
    for name, part in table.parts.items():
        yield f"| `{name}` | {described(part)} | {known[name]} |"
    if table.payload:
        yield f"| `{table.payload}` | payload, not copied | {known[table.payload]} |"


def _summary(record: type) -> str:
    text = (inspect.getdoc(record) or "").partition("\n\n")[0]
    return " ".join(text.replace("``", "`").split())


def _fields(record: type) -> str:
    found = "\n".join(rows(record))
    return f"\n\n| field | type and limits | meaning |\n|---|---|---|\n{found}" if found else ""


def _nested(records: Collection[type]) -> Iterator[str]:
    """The records in the fields of these, each once."""
    found: dict[type, None] = {}

    def visit(table: Table) -> None:
        for part in table.parts.values():
            if part.form == "record" and part.type is not tuple:
                found[part.type] = None
            visit(part)

    for record in records:
        visit(table_of(record))
    for record in found:
        if record not in records:
            yield f"\n### {record.__name__}\n\n{_summary(record)}{_fields(record)}\n"


def _messages(group: Group) -> Iterator[str]:
    by_record: dict[type, list[int]] = {}
    for kind, record in group.messages.records.items():
        by_record.setdefault(record, []).append(kind)
    for record, kinds in by_record.items():
        numbers = ", ".join(str(int(kind)) for kind in sorted(kinds))
        yield f"\n### {record.__name__}: {numbers}\n\n{_summary(record)}"
        named = [kind for kind in kinds if hasattr(kind, "meaning")]
        if named:
            yield "\n\n| kind | message | payload | meaning |\n|---|---|---|---|"
            for kind in sorted(named):
                payload = "yes" if kind in group.messages.payloads else ""
                yield f"\n| {int(kind)} | `{kind.name}` | {payload} | {kind.meaning} |"
        yield _fields(record) + "\n"
    yield from _nested(by_record)


def _records(records: dict[type, str]) -> Iterator[str]:
    for record, place in records.items():
        yield f"\n### {record.__name__}\n\n{_summary(record)} {place[0].upper()}{place[1:]}."
        yield _fields(record) + "\n"
    yield from _nested(records)


def text() -> str:
    """The page."""
    out = [_HEAD]
    for group in MAILBOXES:
        out += [_MAILBOX.format(title=group.title, place=group.place), *_messages(group)]
    out += [_FRAMES.format(title=FRAMES.title, place=FRAMES.place), *_messages(FRAMES), _HEADERS]
    out += _records(HEADERS)
    out += [_TEXTS, *_records(TEXTS)]
    return "".join(out)


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
