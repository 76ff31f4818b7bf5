"""The plan file: measurements, trials and choices as readable JSON.

A file holds one record and the key of the model and cluster for which it is valid. A record is a
frozen dataclass with a class attribute ``kind`` and a method ``explain``, which `wingbeat.schema`
converts. The dataclasses check ranges in ``__post_init__``.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from wingbeat.errors import UsageError
from wingbeat.files import replacing
from wingbeat.schema import MalformedMessage, from_json, to_json

FORMAT, VERSION = "wingbeat plan", 1
REMEDY = "delete the file to plan again"

_MAX_LINE = 100


class Record(Protocol):
    """The content of a plan file: a frozen dataclass."""

    kind: ClassVar[str]

    def explain(self) -> str | list[str]:
        """Summarize the record."""


R = TypeVar("R", bound=Record)


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
        return Saved(from_json(record, data), from_json(dict, data.get("key"), "key"))
    except MalformedMessage as err:
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


def check_range(name: str, values: Iterable[float], least: float, most: float = math.inf) -> None:
    """Raise a `UsageError` for a value that is not finite, below ``least`` or above ``most``."""
    for value in values:
        if not (math.isfinite(value) and least <= value <= most):
            above = "" if most == math.inf else f", {most:g} at most"
            raise UsageError(f"{name} is {value!r}; allowed: {least:g} or more{above}")
