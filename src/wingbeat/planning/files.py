"""The plan file: measurements, trials and choices as readable JSON.

A file holds one record and the key of the model and cluster for which it is valid. A record is a
frozen dataclass with a class attribute ``kind`` and a method ``explain``. `to_json` and `from_json`
convert any such dataclass, following the types of its fields. The dataclasses check ranges in
``__post_init__``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar, Union, get_args, get_origin
from typing import get_type_hints as type_hints

from wingbeat.errors import UsageError
from wingbeat.files import replacing

FORMAT, VERSION = "wingbeat plan", 1
REMEDY = "delete the file to plan again"

MAX_NUMBER = 1e15
"""Upper limit of measured amounts and times, below which arithmetic cannot overflow to infinity."""

_MAX_LINE = 100


class Record(Protocol):
    """The content of a plan file: a frozen dataclass."""

    kind: ClassVar[str]

    def explain(self) -> str | list[str]:
        """Summarize the record."""


R = TypeVar("R", bound=Record)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Saved(Generic[R]):
    """A record, and the model, cluster and strategy for which it is valid, as JSON values."""

    record: R
    key: dict[str, Any]

    def matches(self, key: Mapping[str, Any]) -> bool:
        """Return whether the file is valid for this model, cluster and strategy."""
        return bool(self.key == json.loads(json.dumps(dict(key))))


def save(path: str | os.PathLike[str], record: Record, key: Mapping[str, Any]) -> None:
    """Write a plan file atomically; a symbolic link is followed and its target replaced.

    A folder that is missing or not writable is a `UsageError`.
    """
    name = _name(path)
    folder = Path(os.path.realpath(path)).absolute().parent
    if not folder.is_dir():
        raise UsageError(f"cannot write {name}: there is no folder {str(folder)!r}")
    head = {"format": FORMAT, "version": VERSION, "kind": record.kind, "summary": record.explain()}
    text = _indented({**head, **to_json(record), "key": dict(key)})
    with replacing(path, name) as file:
        file.write(f"{text}\n".encode())


def load(path: str | os.PathLike[str], record: type[R]) -> Saved[R]:
    """Read a plan file; `UsageError` if it is missing, damaged, or of another kind or version."""
    name = _name(path)
    data = _parsed(path)
    if data.get("kind") != record.kind:
        raise UsageError(
            f"{name} holds a plan of kind {data.get('kind')!r}, not {record.kind!r}; name another, "
            f"or {REMEDY}"
        )
    try:
        return Saved(from_json(record, data, ""), from_json(dict, data.get("key"), "key"))
    except UsageError as err:
        raise UsageError(f"{name} is damaged: {err}; {REMEDY}") from None


def load_if_present(file: str, record: type[R]) -> Saved[R] | None:
    """Read the ``plan_file`` of a strategy; None before it exists. `UsageError` as in `load`."""
    path = Path(file)
    try:
        if path.exists():
            return load(path, record)
        folder = path.absolute().parent
        if folder.is_dir():
            return None
    except OSError as err:
        raise UsageError(f"plan_file={file!r}: {err.strerror or err}") from None
    raise UsageError(f"plan_file={file!r}: there is no folder {str(folder)!r}")


def kind_of(path: str | os.PathLike[str]) -> str:
    """Return the kind of record in a plan file."""
    return str(_parsed(path).get("kind"))


def digest(parameters: list[list[Any]]) -> str:
    """Return a digest of the names, shapes and dtypes of a model's parameters."""
    return hashlib.sha256(json.dumps(parameters).encode()).hexdigest()[:16]


def _name(path: str | os.PathLike[str]) -> str:
    return f"plan file {str(path)!r}"


def _parsed(path: str | os.PathLike[str]) -> dict[str, Any]:
    name, useless = _name(path), f"name another, or {REMEDY}"
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        json.dumps(data, ensure_ascii=False).encode()  # rejects lone surrogates
    except OSError as err:
        raise UsageError(f"cannot read {name}: {err.strerror or err}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{name} is damaged: it is not UTF-8 text; {useless}") from None
    except (ValueError, RecursionError) as err:
        raise UsageError(f"{name} is damaged: {err}; {useless}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise UsageError(f"{name} is not a plan file of this version of wingbeat; {useless}")
    if data.get("version") != VERSION:
        raise UsageError(
            f"{name} has version {data.get('version')!r}; this wingbeat reads version {VERSION}; "
            f"{REMEDY}"
        )
    return data


def _indented(value: Any, indent: int = 0) -> str:
    """Format JSON; values that fit on one line stay on one line.

    >>> print(_indented({"a": [1, 2], "b": {"c": 3}}))
    {
      "a": [1, 2],
      "b": {"c": 3}
    }
    """
    short = json.dumps(value)
    fits = indent > 0 and indent + len(short) <= _MAX_LINE
    if fits or not value or not isinstance(value, (dict, list)):
        return short
    inner = indent + 2
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {_indented(each, inner)}" for key, each in value.items()]
    else:
        parts = [_indented(each, inner) for each in value]
    left, right = "{}" if isinstance(value, dict) else "[]"
    lines = ",\n".join(" " * inner + part for part in parts)
    return f"{left}\n{lines}\n{' ' * indent}{right}"


# -- records and JSON ----------------------------------------------------------------------------


def to_json(value: Any) -> Any:
    """Convert a frozen dataclass, and all that it contains, to JSON values.

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


def from_json(hint: type[T], data: Any, where: str) -> T:
    """Convert the output of `to_json` back to a value of the type ``hint``.

    Missing fields take their defaults. Numbers have to be finite, at most `MAX_NUMBER`.
    """
    value: T = _converted(hint, data, where)
    return value


def _converted(hint: Any, data: Any, where: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _record(hint, _checked(dict, data, where), where)
    if origin in (Union, types.UnionType):
        return _member(args, data, where)
    if origin is tuple:
        values = _checked(list, data, where)
        if args[-1] is Ellipsis:
            return tuple(
                _converted(args[0], each, f"{where}[{i}]") for i, each in enumerate(values)
            )
        if len(values) != len(args):
            raise UsageError(f"{where} is {data!r:.60}; allowed: a list of {len(args)} values")
        return tuple(_converted(arg, each, where) for arg, each in zip(args, values, strict=True))
    if origin is dict:
        items = _checked(dict, data, where).items()
        return {key: _converted(args[1], each, f"{where}.{key}") for key, each in items}
    if hint is float:
        return _number(data, where)
    return _checked(hint, data, where)


def _record(cls: Any, data: dict[str, Any], where: str) -> Any:
    prefix = f"{where}." if where else ""
    hints, values = type_hints(cls), {}
    for field in dataclasses.fields(cls):
        if field.name in data:
            each = data[field.name]
            values[field.name] = _converted(hints[field.name], each, prefix + field.name)
        elif field.default is dataclasses.MISSING:
            raise UsageError(f"{prefix}{field.name} is missing")
    try:
        return cls(**values)
    except UsageError as err:
        raise UsageError(f"{where}: {err}" if where else str(err)) from None


def _member(args: tuple[Any, ...], data: Any, where: str) -> Any:
    if data is None and types.NoneType in args:
        return None
    members = [arg for arg in args if arg is not types.NoneType]
    if len(members) == 1:
        return _converted(members[0], data, where)
    kind = _checked(dict, data, where).get("kind")
    for member in members:
        if member.kind == kind:
            return _converted(member, data, where)
    kinds = ", ".join(member.kind for member in members)
    raise UsageError(f"{where}.kind is {kind!r:.60}; allowed: {kinds}")


def _checked(hint: Any, data: Any, where: str) -> Any:
    """Return a dict, list, string or whole number; ``bool`` does not pass as ``int``."""
    if type(data) is not hint or (hint is int and not abs(data) < 2**53):
        names = {dict: "an object", list: "a list", str: "a string", int: "a whole number"}
        raise UsageError(f"{where} is {data!r:.60}; allowed: {names[hint]}")
    return data


def _number(data: Any, where: str) -> float:
    if type(data) not in (int, float) or not abs(data) <= MAX_NUMBER:  # NaN fails too
        raise UsageError(f"{where} is {data!r:.60}; allowed: a number up to {MAX_NUMBER:g}")
    return float(data)


def check_range(name: str, values: Iterable[float], least: float, most: float = math.inf) -> None:
    """Raise a `UsageError` for a value that is not finite, below ``least`` or above ``most``."""
    for value in values:
        if not (math.isfinite(value) and least <= value <= most):
            above = "" if most == math.inf else f", {most:g} at most"
            raise UsageError(f"{name} is {value!r}; allowed: {least:g} or more{above}")
