"""Integrations with other training libraries, imported on first use, and checks of those.

The libraries are optional, and the integrations depend on names that a release may change.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from wingbeat.errors import UsageError

__all__ = [
    "accelerate",
    "checkpoint",
    "ddp",
    "fabric",
    "lightning",
    "lightning_fabric",
    "process_group",
    "pytorch_lightning",
    "transformers",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'wingbeat.integrations' has no attribute {name!r}")
    return importlib.import_module(f"wingbeat.integrations.{name}")


def library(name: str, least: str, *, extra: str | None = None) -> Any:
    """Import a library; raises UsageError if it is missing or older than ``least``.

    ``extra`` names the extra of wingbeat that installs it; default: ``name``.
    """
    remedy = f"pip install 'wingbeat[{extra or name}]'"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise  # the library exists, but one of its dependencies does not
        raise UsageError(f"wingbeat.integrations.{name} needs {name}: {remedy}") from None
    version = str(getattr(module, "__version__", "0"))
    if _numbers(version) < _numbers(least):
        raise UsageError(
            f"wingbeat.integrations.{name} needs {name} {least} or newer, and {version} is "
            f"installed: {remedy}"
        )
    return module


def check_names(title: str, names: Mapping[Any, Iterable[str]]) -> None:
    """Raise UsageError if a class or object lacks one of the ``names`` used here.

    ``title`` is the library's display name and version.
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
