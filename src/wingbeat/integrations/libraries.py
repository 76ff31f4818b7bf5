"""Other people's libraries: are they there, new enough, and still as they are used here?"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from wingbeat.errors import UsageError


def library(name: str, least: str, *, extra: str | None = None) -> Any:
    """Import a library.

    Args:
        name: of the module.
        least: the first version that this was written for.
        extra: of wingbeat, which brings it; default: ``name``.

    Raises:
        UsageError: it is not installed, or older; says how to install it.
    """
    remedy = f"pip install 'wingbeat[{extra or name}]'"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise  # it is there, and something that it needs itself is not
        raise UsageError(f"wingbeat.integrations.{name} needs {name}: {remedy}") from None
    version = str(getattr(module, "__version__", "0"))
    if _numbers(version) < _numbers(least):
        raise UsageError(
            f"wingbeat.integrations.{name} needs {name} {least} or newer, and {version} is "
            f"installed: {remedy}"
        )
    return module


def check_names(title: str, names: Mapping[Any, Iterable[str]]) -> None:
    """Make sure that a library has the private names that are used or overridden here.

    Args:
        title: the library, as people call it, with its version.
        names: of which class or object, which.

    Raises:
        UsageError: a release has moved one; names it.
    """
    for owner, used in names.items():
        for name in used:
            if not hasattr(owner, name):
                kind = owner if isinstance(owner, type) else type(owner)
                raise UsageError(
                    f"{title} has no {kind.__name__}.{name} any more, which wingbeat counts on: "
                    "install the version that wingbeat's constraints.txt names, and report this"
                )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])
