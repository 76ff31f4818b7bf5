"""What strategies and wires have in common: a short repr, and checks that name what is allowed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeGuard

from wingbeat.errors import UsageError, unknown


class Settings:
    """A frozen dataclass of options."""

    def __repr__(self) -> str:
        """The call that makes it, without the options that are at their defaults."""
        given = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)  # type: ignore[arg-type]
            if getattr(self, f.name) != f.default
        ]
        return f"{type(self).__name__}({', '.join(given)})"

    def _refuse(self, key: str, allowed: str) -> UsageError:
        return UsageError(
            f"{type(self).__name__}({key}={getattr(self, key)!r}): allowed are {allowed}"
        )

    def check_name(self, key: str, allowed: tuple[str, ...]) -> None:
        """Raise a `UsageError` unless the option is one of the names ``allowed``."""
        value = getattr(self, key)
        if value not in allowed:
            raise unknown(f"{type(self).__name__} {key}", str(value), allowed)

    def check_count(self, key: str, low: int, high: int) -> None:
        """Raise a `UsageError` unless the option is a whole number from ``low`` to ``high``."""
        value = getattr(self, key)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._refuse(key, f"whole numbers, {low} to {high}")

    def check_flag(self, key: str) -> None:
        """Raise a `UsageError` unless the option is True or False."""
        if not isinstance(getattr(self, key), bool):
            raise self._refuse(key, "True and False")

    def check_number(self, key: str, allowed: str, good: Callable[[float], bool]) -> None:
        """Raise a `UsageError` unless the option is a finite number that is ``good``."""
        value = getattr(self, key)
        if not is_number(value) or not good(value):
            raise self._refuse(key, allowed)


def is_number(value: Any) -> TypeGuard[float]:
    """Whether ``value`` is a finite number, and no bool."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float can hold
        return False
