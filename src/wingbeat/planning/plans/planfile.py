"""What files of plans have in common, whatever found the plan: JSON, whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from wingbeat.errors import UsageError
from wingbeat.files import replacing

_Content = TypeVar("_Content")
_Box = TypeVar("_Box", dict[str, Any], list[Any])


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of file.

    Attributes:
        noun: what messages call it.
        format: what its ``format`` says.
        version: what its ``version`` says.
        again: what to do without it, after "delete the file to".
    """

    noun: str
    format: str
    version: int
    again: str

    @property
    def remedy(self) -> str:
        """What to do about a file that is of no use."""
        return f"delete the file to {self.again}"

    def head(self) -> dict[str, Any]:
        """Return what such a file begins with."""
        return {"format": self.format, "version": self.version}

    def write(self, path: str | os.PathLike[str], text: str) -> None:
        """Write the file in one go: whoever looks sees the old one or the new one, never a part.

        A symbolic link stays, and what it points to is written.

        Raises:
            UsageError: the folder is missing or cannot be written.
        """
        name = f"{self.noun} {str(path)!r}"
        target = Path(os.path.realpath(path))
        if not target.absolute().parent.is_dir():
            folder = str(target.absolute().parent)
            raise UsageError(f"cannot write {name}: there is no folder {folder!r}")
        with replacing(path, name) as file:
            file.write(text.encode())

    def read(
        self, path: str | os.PathLike[str], understand: Callable[[dict[str, Any]], _Content]
    ) -> _Content:
        """Read a file of this kind and version.

        Args:
            path: the file.
            understand: makes of it what it holds; raises `UsageError` if something is wrong.

        Raises:
            UsageError: no such file, a file of another kind or version, or a damaged one.
        """
        name, useless = f"{self.noun} {str(path)!r}", f"name another, or {self.remedy}"
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as err:
            raise UsageError(f"cannot read {name}: {err.strerror or err}") from None
        except UnicodeDecodeError:
            raise UsageError(f"{name} is damaged: it is no text; {useless}") from None
        try:
            data = json.loads(text)
            json.dumps(data, ensure_ascii=False).encode()  # half a surrogate pair is no text
        except (ValueError, RecursionError) as err:
            raise UsageError(f"{name} is damaged: {err}; {useless}") from None
        if not isinstance(data, dict) or data.get("format") != self.format:
            raise UsageError(f"{name} is no {self.noun} of wingbeat; {useless}")
        if data.get("version") != self.version:
            raise UsageError(
                f"{name} has version {data.get('version')!r}; this wingbeat reads version "
                f"{self.version}; {self.remedy}"
            )
        try:
            return understand(data)
        except UsageError as err:
            raise UsageError(f"{name} is damaged: {err}; {self.remedy}") from None


TUNED = Kind("plan file", "wingbeat bucket plan", 1, "tune again")
THRESHOLDS = Kind("plan file", "wingbeat thresholds", 1, "tune again")
MEASURED = Kind("probe file", "wingbeat probe", 1, "measure again")


def kind_of(path: Path) -> Kind:
    """Return which kind of file it is; of what cannot be read, that of tuned bucket sizes."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return TUNED
    said = data.get("format") if isinstance(data, dict) else None
    return next((kind for kind in (MEASURED, THRESHOLDS) if kind.format == said), TUNED)


def known(file: str, load: Callable[[Path], _Content]) -> _Content | None:
    """Return what ``load`` makes of a strategy's ``plan_file``, None if there is none yet.

    Raises:
        UsageError: there is no folder for it, or ``load`` refuses it.
    """
    path = Path(file)
    try:
        if path.exists():
            return load(path)
        folder = path.absolute().parent
        if folder.is_dir():
            return None
    except OSError as err:
        raise UsageError(f"plan_file={file!r}: {err.strerror or err}") from None
    raise UsageError(f"plan_file={file!r}: there is no folder {str(folder)!r}")


def part(data: Mapping[str, Any], key: str, kind: type[_Box]) -> _Box:
    """Return the list or dict under ``key``.

    Raises:
        UsageError: it is missing or something else.
    """
    value = data.get(key)
    if not isinstance(value, kind):
        raise UsageError(f"{key!r} is missing or no {kind.__name__}")
    return value


def rows(data: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Return the list of dicts under ``key``.

    Raises:
        UsageError: it is missing or something else.
    """
    values = part(data, key, list)
    if not all(isinstance(value, dict) for value in values):
        raise UsageError(f"{key!r} is no list of dicts")
    return values


def whole(value: Any, where: str, least: int) -> int:
    """Return a value that has to be a whole number from ``least`` on.

    Raises:
        UsageError: it is none.
    """
    if type(value) is not int or not least <= value < 2**53:
        raise UsageError(f"{where} holds {value!r}; allowed are whole numbers from {least} on")
    return value


def number(value: Any, where: str, least: float, most: float) -> float:
    """Return a value that has to be a number between two.

    Raises:
        UsageError: it is none.
    """
    # Written so that NaN fails as well.
    if type(value) not in (int, float) or not least <= value <= most:
        allowed = f"numbers from {least:g} to {most:g}"
        raise UsageError(f"{where} holds {value!r}; allowed are {allowed}")
    return float(value)


def same_key(saved: Mapping[str, Any], key: Mapping[str, Any]) -> bool:
    """Whether a file's key is ``key``, as JSON knows it."""
    same: bool = saved == json.loads(json.dumps(dict(key)))
    return same


def digest(parameters: list[list[Any]]) -> str:
    """Return what tells these parameters' names, shapes and dtypes from others."""
    return hashlib.sha256(json.dumps(parameters).encode()).hexdigest()[:16]
