"""Read TOML, with errors of one line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from wingbeat.errors import UsageError


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Parse a document; UsageError naming ``where`` if it is not TOML."""
    # Imported here because the process inside a lab has only the standard library, which has no
    # TOML on Python 3.10. Only the launcher reads files.
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        data: dict[str, Any] = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as err:
        raise UsageError(f"{where} is not TOML: {err}") from None
    return data


def read_toml(path: str, kind: str) -> str:
    """Read a file's text; UsageError naming the ``kind`` of file if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as err:
        raise UsageError(f"cannot read {kind} {path!r}: {err.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{kind} {path!r} is not UTF-8 text") from None
