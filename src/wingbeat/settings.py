"""What strategies and wires have in common: a short repr, and checks that name what is allowed."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeGuard

from wingbeat.errors import UsageError, unknown

if TYPE_CHECKING:
    from typing_extensions import Self  # `typing` has it from Python 3.11 on

_SHORT = reprlib.Repr()
_SHORT.maxother = _SHORT.maxstring = 60


class Settings:
    """A frozen dataclass of options, all given by name.

    Raises:
        UsageError: an option that does not exist, or one without its name.
    """

    def __new__(cls, *unnamed: Any, **options: Any) -> Self:
        """Refuse what the dataclass would refuse with a bare TypeError that names no option.

        A `UsageError` and nothing else: a wrong option is a value that cannot work, like any
        other, and who catches those (the command line does) is to catch this one as well. To
        catch a wrong call as a TypeError is of no use: nothing but the call itself can be mended.
        """
        known = {f.name: f.default for f in fields(cls)}  # type: ignore[arg-type]
        if unnamed:
            raise _unnamed(cls.__name__, unnamed[0], known)
        for key, value in options.items():
            if key not in known:
                where = f"{cls.__name__}({key}={_short(value)})"
                raise unknown("option", key, known, where=where)
        return super().__new__(cls)

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


def _unnamed(name: str, value: Any, known: dict[str, Any]) -> UsageError:
    """Build the error for a value without its name; the example is an option of that kind."""
    kinds = {int, float} if is_number(value) else {type(value)}
    fits = [key for key, default in known.items() if type(default) in kinds]
    key = next(iter(fits or known))
    shown = _short(value) if fits else repr(known[key])
    return UsageError(
        f"{name}({_short(value)}): options are given by name, such as {name}({key}={shown}); "
        f"allowed: {', '.join(sorted(known))}"
    )


def _short(value: Any) -> str:
    """Return the value in a few words on one line: it may be a model."""
    return " ".join(_SHORT.repr(value).split())


def is_number(value: Any) -> TypeGuard[float]:
    """Whether ``value`` is a finite number, and no bool."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float can hold
        return False
