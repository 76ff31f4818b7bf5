"""Records: tables of fields, from which encoding, decoding, checks and limits follow. No torch.

A record is a frozen dataclass or a NamedTuple. Its annotations are the table: the type of each
field, with limits in `Annotated`. A record is sent as *words*, which are whole numbers from 0, or
as JSON. Decoding checks types, ranges and lengths before use; it raises `MalformedMessage`, which
names the field and the value. ``sizes``, such as ``workers=4``, are limits known to both sides.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import json
import operator
import reprlib
import struct
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from wingbeat.errors import UsageError

T = TypeVar("T")
Sizes = Mapping[str, int]

MAX_REAL = 1e15
"""Upper limit of numbers in JSON, below which arithmetic cannot overflow to infinity."""


class MalformedMessage(ValueError):
    """A message or text that no process of this job sends."""


# -- limits in annotations ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Range:
    """A number from ``least`` to below ``end``, which is a number or the name of a size."""

    least: float = 0
    end: float | str = 1 << 32
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Length:
    """Number of items: the size of this name; or ``least`` to ``most``, sent before the items.

    With ``increasing``, each item is greater than the one before it.
    """

    size: str = ""
    most: int = 1 << 16
    least: int = 0
    increasing: bool = False


@dataclass(frozen=True, slots=True)
class Text:
    """A text, cut to ``most`` characters and made printable."""

    most: int


@dataclass(frozen=True, slots=True)
class Mask:
    """A set of numbers below the size of this name, as the bits of one integer; only in words."""

    size: str


Word = Annotated[int, Range()]
"""A number of at most 4 bytes."""

WorkerId = Annotated[int, Range(0, "workers")]
"""The rank of one of the ``workers``."""

_IDS = 4
_MAX_WORDS_NBYTES = 1 << 20

Payload = Annotated[Any, "payload"]
"""The payload of a message, its last field: a buffer after the words, which is not copied."""


# -- tables -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """What an annotation states: a type, its limits, and the tables of what it contains.

    ``form`` is ``number``, ``mask``, ``items``, ``record``, ``union``, or else a type of JSON.
    """

    form: str
    type: Any
    limits: Any = None
    parts: Mapping[str, Table] = dataclasses.field(default_factory=dict)
    payload: str = ""


_NUMBERS = {
    bool: Range(0, 2),
    int: Range(1 - (1 << 53), 1 << 53),
    float: Range(-MAX_REAL, MAX_REAL),
}
_JSON = {dict: "an object", list: "a list", str: "a string", bool: "true or false",
         int: "a whole number", float: "a number"}  # fmt: skip


def _table_of(hint: Any) -> Table:
    marks: dict[type, Any] = {}
    while get_origin(hint) is Annotated or hasattr(hint, "__supertype__"):
        marks |= {type(mark): mark for mark in getattr(hint, "__metadata__", ())}
        hint = getattr(hint, "__supertype__", None) or hint.__origin__
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return Table("union", hint, None, {str(each): table_of(each) for each in args})
    if origin is tuple and args[-1] is not Ellipsis:
        return Table("record", tuple, None, {str(i): table_of(arg) for i, arg in enumerate(args)})
    if origin in (tuple, list, dict):
        item = table_of(tuple[args] if origin is dict else args[0])  # type: ignore[valid-type]
        return Table("items", origin, marks.get(Length, Length()), {"item": item})
    if Mask in marks:
        return Table("mask", int, marks[Mask])
    if hint in _NUMBERS:
        return Table("number", hint, marks.get(Range, _NUMBERS[hint]))
    if hint in (str, dict, Any, types.NoneType):
        return Table("json", hint, marks.get(Text))
    if issubclass(hint, enum.IntEnum):
        return Table("number", hint, Range(0, 1 + max(hint)))
    hints = get_type_hints(hint, include_extras=True)
    listed = issubclass(hint, tuple)
    names = hint._fields if listed else [each.name for each in dataclasses.fields(hint)]
    parts = {name: table_of(hints[name]) for name in names if hints[name] != Payload}
    payload = next((name for name in names if name not in parts), "")
    assert not payload or payload == names[-1], f"{payload} is not the last field of {hint}"
    return Table("record", hint, None, parts, payload)


table_of: Callable[[Any], Table] = functools.cache(_table_of)
"""Return the table of an annotation."""


# -- words --------------------------------------------------------------------------------


class _Words:
    __slots__ = ("at", "payload", "sizes", "words")

    def __init__(self, words: Sequence[int], sizes: Sizes, payload: Any = None) -> None:
        self.words, self.sizes, self.payload, self.at = words, sizes, payload, 0

    def take(self, name: str, limits: Length, width: int = 1) -> tuple[int, Sequence[int]]:
        """Return the number of items, and their words if each has ``width`` words."""
        if limits.size:
            count = self.sizes[limits.size]
        else:
            what = f"the number of {name}"
            count = _COUNT.read(self, what)
            _check_count(count, limits, self.sizes, what)
        at, left = self.at, len(self.words) - self.at
        if count * max(1, width) > left:
            raise MalformedMessage(f"{name} has {count} items in {left} words")
        self.at += count * width
        return count, self.words[at : self.at]


class _Codec(NamedTuple):
    """How values of a table are read from words and written; prepared once for each table.

    Items that are numbers, or tuples of ``width`` numbers, are read and written all at once.
    """

    read: Callable[[_Words, str], Any]
    write: Callable[[Any, list[int]], object]
    width: int = 0
    read_all: Callable[[Sequence[int], Sizes], Sequence[Any] | None] = lambda *_: None
    flatten: Callable[[Iterable[Any]], Iterable[int]] | None = None


@functools.cache
def _codec(table: Table) -> _Codec:
    codecs = {"number": _number, "mask": _mask, "items": _items, "record": _record}
    if table.form not in codecs:
        raise TypeError(f"{table.type} has no words")
    return codecs[table.form](table)


def _number(table: Table) -> _Codec:
    kind, least, end = table.type, table.limits.least, table.limits.end
    named, shift = isinstance(end, str), min(0, least)
    plain = kind is int and not shift

    def read(words: _Words, name: str) -> Any:
        try:
            number = words.words[words.at] + shift
        except IndexError:
            raise MalformedMessage(f"{name} is missing") from None
        words.at += 1
        if least <= number < (words.sizes[end] if named else end):
            return number if kind is int else kind(number)
        return _load_number(table, number, name, words.sizes)  # raises

    def read_all(row: Sequence[int], sizes: Sizes) -> Sequence[Any] | None:
        last = (sizes[end] if named else end) - 1 - shift
        if not row or not least - shift <= min(row) <= max(row) <= last:
            return None
        return row if plain else [kind(word + shift) for word in row]

    def flatten(values: Iterable[int]) -> Iterable[int]:
        return values if plain else [value - shift for value in values]

    return _Codec(read, lambda value, out: out.append(value - shift), 1, read_all, flatten)


_COUNT = _number(Table("number", int, Range()))


def _mask(table: Table) -> _Codec:
    def read(words: _Words, name: str) -> int:
        bits = words.sizes[table.limits.size]
        _, limbs = words.take(name, Length(most=-(-bits // 32)))
        mask = sum(limb << 32 * place for place, limb in enumerate(limbs))
        if mask >> bits or limbs_of(mask) != [*limbs]:  # a mask has one encoding
            raise _wrong(name, f"{mask:x}", f"{bits} bits in hexadecimal, in the fewest words")
        return mask

    def limbs_of(mask: int) -> list[int]:
        return [mask >> bit & 0xFFFFFFFF for bit in range(0, mask.bit_length(), 32)]

    def write(value: int, out: list[int]) -> None:
        limbs = limbs_of(value)
        out += [len(limbs), *limbs]

    return _Codec(read, write)


def _items(table: Table) -> _Codec:
    kind, limits, item = table.type, table.limits, _codec(table.parts["item"])

    def read(words: _Words, name: str) -> Any:
        count, row = words.take(name, limits, item.width)
        items = item.read_all(row, words.sizes)
        if items is None:  # read one by one; raises with the name of a wrong number
            words.at -= len(row)
            items = [item.read(words, f"{name}[{place}]") for place in range(count)]
        if limits.increasing or kind is dict:
            _check_order([key for key, _ in items] if kind is dict else items, name)
        return kind(items)

    def write(value: Any, out: list[int]) -> None:
        if not limits.size:
            out.append(len(value))
        values = sorted(value.items()) if kind is dict else value
        if item.flatten:
            out += item.flatten(values)
        else:
            for each in values:
                item.write(each, out)

    return _Codec(read, write)


def _record(table: Table) -> _Codec:
    kind, parts = table.type, table.parts.values()
    dot, listed = "" if kind is tuple else ".", issubclass(kind, tuple) and not table.payload
    codecs = [_codec(part) for part in parts]
    reads = [(dot and name, each.read) for name, each in zip(table.parts, codecs, strict=True)]
    writes = [(name, each.write) for name, each in zip(table.parts, codecs, strict=True)]
    width = len(parts) if listed and all(part.form == "number" for part in parts) else 0
    plain = width > 0 and all(part.type is int and part.limits.least >= 0 for part in parts)

    def read(words: _Words, name: str) -> Any:
        prefix = name and name + dot
        found = [read(words, prefix + field) for field, read in reads]
        if listed:
            return tuple.__new__(kind, found)
        return kind(*found, words.payload) if table.payload else kind(*found)

    def read_all(row: Sequence[int], sizes: Sizes) -> Sequence[Any] | None:
        columns = [each.read_all(row[at::width], sizes) for at, each in enumerate(codecs[:width])]
        if not width or None in columns:
            return None
        rows = zip(*columns, strict=True)
        return tuple(rows) if kind is tuple else tuple(map(kind._make, rows))

    def write(value: Any, out: list[int]) -> None:
        if plain:
            out += value
            return
        for place, (name, put) in enumerate(writes):
            put(value[place] if kind is tuple else getattr(value, name), out)

    flatten = itertools.chain.from_iterable if plain else None
    return _Codec(read, write, width, read_all, flatten)


def to_words(record: Any) -> list[int]:
    """Return the words of a record, without its payload."""
    out: list[int] = []
    _codec(table_of(type(record))).write(record, out)
    return out


def to_bytes(record: Any) -> bytes:
    """Return the words of a record, in 4 bytes each."""
    return _packed(to_words(record))


def _packed(words: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(words)}I", *words)


def from_words(kind: type[T], words: Sequence[int], payload: Any = None, **sizes: int) -> T:
    """Return the record of these words, and of the payload if it has one."""
    reader, table = _Words(words, sizes, payload), table_of(kind)
    made: T = _codec(table).read(reader, "")
    if reader.at < len(words):
        raise MalformedMessage(f"{len(words) - reader.at} extra words in {kind.__name__}")
    if payload is not None and not table.payload:
        raise MalformedMessage(f"unexpected payload of {len(payload)} bytes in {kind.__name__}")
    return made


def read_prefix(kind: type[T], buffer: Any, **sizes: int) -> tuple[T, int]:
    """Return the record that a buffer begins with, in words of 4 bytes, and their bytes."""
    data = memoryview(buffer).cast("B")
    reader = _Words(data[: len(data) & ~3].cast("I"), sizes)
    made: T = _codec(table_of(kind)).read(reader, "")
    return made, 4 * reader.at


# -- JSON ---------------------------------------------------------------------------------


def _wrong(where: str, value: Any, allowed: str) -> MalformedMessage:
    return MalformedMessage(f"{where} is {value!r:.60}; allowed: {allowed}")


def _typed(kind: type, data: Any, where: str) -> Any:
    if type(data) is not kind and not (kind is float and type(data) is int):
        raise _wrong(where, data, _JSON[kind])
    return data


def _check_count(count: int, limits: Length, sizes: Sizes, what: str) -> None:
    size = sizes[limits.size] if limits.size else None
    least, most = (limits.least, limits.most) if size is None else (size, size)
    if not least <= count <= most:
        raise _wrong(what, count, f"{least} to {most}")


def _check_order(items: Sequence[Any], where: str) -> None:
    if not all(map(operator.lt, items, items[1:])):
        raise _wrong(where, items, "increasing values")


def _load(table: Table, data: Any, where: str, sizes: Sizes) -> Any:
    """Check JSON values and convert them; ``where`` is their name."""
    if table.form == "number":
        return _load_number(table, data, where, sizes)
    if table.form == "items":
        return _load_items(table, data, where, sizes)
    if table.form == "record":
        return _load_record(table, data, where, sizes)
    if table.form == "union":
        return _load_union(table, data, where, sizes)
    if table.type is not Any:
        _typed(table.type, data, where)
    if table.limits is None:
        return data
    return printable(data[: table.limits.most])


def printable(text: str) -> str:
    """Return a text with a question mark for each character that is not printable."""
    return "".join(c if c.isprintable() else "?" for c in text)


_EXCERPT_CHARS = 80
_excerpts = reprlib.Repr()
_excerpts.maxstring = _EXCERPT_CHARS  # names of parameters are longer than its 30 characters


def excerpt(value: Any) -> str:
    """Return the beginning of a received value for a message, in one line, at any depth.

    >>> excerpt("decoder.layers.11.attention.query.weight")
    "'decoder.layers.11.attention.query.weight'"
    """
    try:
        return _excerpts.repr(value).replace("\n", " ")[:_EXCERPT_CHARS]
    except ValueError:  # a number of thousands of digits
        return f"a large {type(value).__name__}"


def _load_number(table: Table, data: Any, where: str, sizes: Sizes) -> Any:
    if type(data) is not int or table.type is bool:
        _typed(table.type if table.type in _NUMBERS else int, data, where)
    least, end = table.limits.least, table.limits.end
    end = sizes[end] if isinstance(end, str) else end
    if not least <= data < end:  # NaN fails too
        real = f"a number from {least:g} to {end:g}"
        raise _wrong(where, data, real if table.type is float else f"{least} to {end - 1}")
    return data if table.type is int else table.type(data)


def _load_items(table: Table, data: Any, where: str, sizes: Sizes) -> Any:
    limits, item = table.limits, table.parts["item"]
    count = len(_typed(dict if table.type is dict else list, data, where))
    _check_count(count, limits, sizes, f"the number of {where}")
    if table.type is dict:
        pairs = [(f"{where}.{printable(str(key)[:40])}", [key, each]) for key, each in data.items()]
    else:
        pairs = [(f"{where}[{place}]", each) for place, each in enumerate(data)]
    items = table.type(_load(item, each, name, sizes) for name, each in pairs)
    if limits.increasing:
        _check_order(items, where)
    return items


def _load_record(table: Table, data: Any, where: str, sizes: Sizes) -> Any:
    kind, prefix = table.type, f"{where}." if where else ""
    if issubclass(kind, tuple):  # a list of the values in order
        if len(_typed(list, data, where)) != len(table.parts):
            raise _wrong(where, data, f"a list of {len(table.parts)} values")
        names = [where if kind is tuple else prefix + name for name in table.parts]
        parts = zip(table.parts.values(), data, names, strict=True)
        return tuple.__new__(kind, [_load(part, each, name, sizes) for part, each, name in parts])
    values, fields = {}, kind.__dataclass_fields__
    for name, part in table.parts.items():
        if name in _typed(dict, data, where):
            values[name] = _load(part, data[name], prefix + name, sizes)
        elif fields[name].default is MISSING is fields[name].default_factory:
            raise MalformedMessage(f"{prefix}{name} is missing")
    try:
        return kind(**values)
    except UsageError as err:
        raise MalformedMessage(f"{where}: {err}" if where else str(err)) from None


def _load_union(table: Table, data: Any, where: str, sizes: Sizes) -> Any:
    members = [each for each in table.parts.values() if each.type is not types.NoneType]
    if data is None and len(members) < len(table.parts):
        return None
    if len(members) > 1 and members[0].form == "record":
        kinds = {each.type.kind: each for each in members}
        kind = _typed(dict, data, where).get("kind")
        if not isinstance(kind, str) or kind not in kinds:
            raise _wrong(f"{where}.kind", kind, ", ".join(kinds))
        return _load(kinds[kind], data, where, sizes)
    for each in members[:-1]:
        with suppress(MalformedMessage):
            return _load(each, data, where, sizes)
    return _load(members[-1], data, where, sizes)


def to_json(value: Any) -> Any:
    """Convert a record, and all that it contains, to JSON values.

    A class attribute ``kind`` is included, to distinguish the members of a union.
    """
    if dataclasses.is_dataclass(value):
        kind = {"kind": value.kind} if hasattr(value, "kind") else {}
        fields = dataclasses.fields(value)
        return kind | {field.name: to_json(getattr(value, field.name)) for field in fields}
    if isinstance(value, dict):
        return {key: to_json(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(each) for each in value]
    return value


def from_json(hint: type[T], data: Any, where: str = "", **sizes: int) -> T:
    """Convert JSON values to a record or another annotated type. Unknown fields are ignored."""
    value: T = _load(table_of(hint), data, where, sizes)
    return value


def parse_json(hint: type[T], text: Any, where: str = "", **sizes: int) -> T:
    """Convert a text or buffer as `from_json` does."""
    try:
        data = json.loads(text if isinstance(text, str) else bytes(text))
    except (ValueError, RecursionError) as err:
        raise MalformedMessage(f"{where or hint.__name__} is not JSON: {err!s:.60}") from None
    return from_json(hint, data, where, **sizes)


# -- messages of a mailbox ----------------------------------------------------------------


class Kind(enum.IntEnum):
    """Kinds of messages, each with its meaning, where several have one record."""

    meaning: str

    def __new__(cls, number: int, meaning: str) -> Kind:
        """Make a member of an enum."""
        made = int.__new__(cls, number)
        made._value_, made.meaning = number, meaning
        return made


class Messages:
    """The messages of a mailbox: a record for each kind.

    The first four words of a record are the ids of the message. Further words are the payload of a
    message that has no other: neither in its record, nor beside it, as kinds in ``payloads`` have.
    """

    def __init__(self, records: Mapping[int, type], payloads: Collection[int] = ()) -> None:
        self.records, self.payloads = records, payloads
        self._kinds = {record: int(kind) for kind, record in records.items()}
        self._tables = {int(kind): table_of(record) for kind, record in records.items()}
        self._codecs = {table: _codec(table) for table in self._tables.values()}

    def kind_of(self, record: Any) -> int:
        """Return the kind of a record."""
        return self._kinds[type(record)]

    def pack(self, record: Any, kind: int = -1) -> tuple[int, tuple[int, ...], Any]:
        """Return kind, ids and payload of a message; ``kind`` if several have this record."""
        words, payload = to_words(record), table_of(type(record)).payload
        kind = self.kind_of(record) if kind < 0 else kind
        rest = getattr(record, payload) if payload else _packed(words[_IDS:])
        return kind, (*words, 0, 0, 0, 0)[:_IDS], rest

    def parse(self, message: Any, **sizes: int) -> Any:
        """Return the record of a received message; `MalformedMessage` if it is malformed."""
        kind, payload = message.kind, message.payload
        table, words = self._tables.get(kind), message.ids
        if table is None:
            raise _wrong("kind", int(kind), ", ".join(map(str, self._tables)))
        name = table.type.__name__
        if not table.payload and kind not in self.payloads:
            if len(payload) % 4 or len(payload) > _MAX_WORDS_NBYTES:
                raise _wrong(f"the payload of {name}", len(payload), "words of 4 bytes")
            words = *words, *struct.unpack(f"<{len(payload) // 4}I", payload)
        reader = _Words(words, sizes, payload)
        made, extra = self._codecs[table].read(reader, ""), len(words) - reader.at
        if extra > 0 and (len(words) > _IDS or any(words[reader.at :])):
            raise MalformedMessage(f"{extra} extra words in {name}")
        return made
