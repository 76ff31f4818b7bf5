"""Base class of options: their repr, checks and textual form."""

from __future__ import annotations

import functools
import inspect
import math
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Generic, TypeGuard, TypeVar

from wingbeat.errors import UsageError, nearest, unknown

if TYPE_CHECKING:
    from typing_extensions import Self  # `typing` has it from Python 3.11 on

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

READ = "read"
"""Metadata key of an option: its parser, if its default's type cannot parse it."""

MAX_MB = 4096
"""Largest bucket size in MB."""

SIZE = {"size": True}
"""Metadata of an option that is a size: it scales with the model."""

_SHORT = reprlib.Repr()
_SHORT.maxother = _SHORT.maxstring = 60


def is_on(variable: str, env: Mapping[str, str]) -> bool:
    """Whether an environment variable is on, which is its default; a `UsageError` if neither."""
    value = env.get(variable, "on").lower()
    if value not in ("on", "off"):
        raise UsageError(f"{variable}={value}: allowed are on and off")
    return value == "on"


class OptionError(UsageError):
    """An option of a part or a preset is invalid.

    Attributes:
        options: the options concerned, with their values.
        reason: what is wrong, and what is allowed; unused with ``names``.
        names: the allowed names, if the option is an unknown one.
    """

    options: Mapping[str, Any]
    reason: str
    names: tuple[str, ...]

    @classmethod
    def of(
        cls, owner: str, options: Mapping[str, Any], reason: str = "", names: Iterable[str] = ()
    ) -> Self:
        """Return the error of ``owner``, the class or the preset with these options."""
        if names:
            ((key, value),) = options.items()
            error = cls(str(unknown(f"{owner} {key}", str(value), names)))
        else:
            given = ", ".join(f"{key}={shown(value)}" for key, value in options.items())
            error = cls(f"{owner}({given}): {reason}")
        error.options, error.reason, error.names = options, reason, tuple(names)
        return error

    def renamed(self, owner: str, keys: Mapping[str, str]) -> Self:
        """Return the same error of another owner, with other keys for some options."""
        options = {keys.get(key, key): value for key, value in self.options.items()}
        return self.of(owner, options, self.reason, self.names)


class Settings:
    """A frozen dataclass of keyword-only options.

    Raises:
        UsageError: an unknown or a positional argument.
    """

    def __new__(cls, *unnamed: Any, **options: Any) -> Self:
        """Raise a `UsageError` in place of the dataclass's `TypeError`, which names no option."""
        check_call(cls.__name__, unnamed, options, defaults_of(cls.__init__))
        return super().__new__(cls)

    def __repr__(self) -> str:
        """The call that creates the value, without options at their defaults."""
        given = [
            f"{f.name}={shown(getattr(self, f.name))}"
            for f in fields(self)  # type: ignore[arg-type]
            if getattr(self, f.name) != f.default
        ]
        return f"{type(self).__name__}({', '.join(given)})"

    def scaled(self, factor: float) -> Self:
        """Return the options for a model of ``factor`` times the size."""
        sizes = [f for f in fields(self) if f.metadata.get("size")]  # type: ignore[arg-type]
        scaled = {f.name: _scaled(getattr(self, f.name), factor, f.default) for f in sizes}
        return replace(self, **scaled)  # type: ignore[type-var]

    def refusal(self, reason: str, *keys: str) -> OptionError:
        """Return the error for the values of the options ``keys``."""
        return OptionError.of(type(self).__name__, {k: getattr(self, k) for k in keys}, reason)

    def _refuse(self, key: str, allowed: str) -> OptionError:
        return self.refusal(f"allowed are {allowed}", key)

    def check_name(self, key: str, allowed: tuple[str, ...]) -> None:
        """Raise a `UsageError` unless the option is one of ``allowed``."""
        value = getattr(self, key)
        if value not in allowed:
            raise OptionError.of(type(self).__name__, {key: value}, names=allowed)

    def check_count(self, key: str, low: int, high: int) -> None:
        """Raise a `UsageError` unless the option is an integer from ``low`` to ``high``."""
        value = getattr(self, key)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._refuse(key, f"whole numbers, {low} to {high}")

    def check_count_if_any(self, key: str, low: int, high: int) -> None:
        """Raise a `UsageError` unless the option is None or an integer in this range."""
        if getattr(self, key) is None:
            return
        try:
            self.check_count(key, low, high)
        except UsageError:
            raise self._refuse(key, f"whole numbers, {low} to {high}, and None") from None

    def check_number_if_any(self, key: str, allowed: str, good: Callable[[float], bool]) -> None:
        """Raise a `UsageError` unless the option is None or a finite number that is ``good``."""
        if getattr(self, key) is not None:
            self.check_number(key, f"{allowed}, and None", good)

    def check_flag(self, key: str) -> None:
        """Raise a `UsageError` unless the option is True or False."""
        if not isinstance(getattr(self, key), bool):
            raise self._refuse(key, "True and False")

    def check_number(self, key: str, allowed: str, good: Callable[[float], bool]) -> None:
        """Raise a `UsageError` unless the option is a finite number that is ``good``."""
        value = getattr(self, key)
        if not is_number(value) or not good(value):
            raise self._refuse(key, allowed)

    def check_size(self, key: str, *, zero: bool = False) -> None:
        """Raise a `UsageError` unless the option is a size in MB; ``zero`` allows 0."""
        least = "from 0" if zero else "above 0"
        self.check_number(
            key,
            f"sizes {least} up to {MAX_MB} MB",
            lambda mb: 0 < mb <= MAX_MB or (zero and mb == 0),
        )

    def check_file(self, key: str) -> None:
        """Raise a `UsageError` unless the option is a file name, or empty for none."""
        value = getattr(self, key)
        if not isinstance(value, str) or "\0" in value:
            raise self._refuse(key, "names of files")


def shown(value: Any) -> str:
    """Return the repr of an option, equal in all processes: of a function its name.

    >>> shown(2), shown(shown), shown(functools.partial(shown, 3))
    ('2', 'shown', 'partial(shown, 3)')
    """
    if isinstance(value, functools.partial):
        named = [f"{key}={shown(each)}" for key, each in value.keywords.items()]
        return f"partial({', '.join([shown(value.func), *map(shown, value.args), *named])})"
    return str(value.__qualname__) if hasattr(value, "__qualname__") else repr(value)


@functools.cache
def defaults_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the keyword-only parameters of ``function`` with their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


@dataclass(frozen=True, slots=True)
class Named(Generic[T_co]):
    """An entry of a table of names.

    Attributes:
        make: creates the value from options.
        option: the option that ``name@value`` sets; empty: none.
        convert: parses that option.
    """

    make: Callable[..., T_co]
    option: str = ""
    convert: Callable[[str], Any] = float


def named(kind: str, text: str, by_name: Mapping[str, Named[T]], *, also: Iterable[str] = ()) -> T:
    """Return the value of ``name`` or ``name@value``; ``also`` extends the names in errors.

    Raises a `UsageError` for an unknown name, a value without an option, or an invalid value.
    """
    name, at, value = text.partition("@")
    if name not in by_name:
        raise unknown(kind, text, [*also, *by_name])
    entry = by_name[name]
    if not at:
        return entry.make()
    if not entry.option:
        raise UsageError(f"{kind}={text!r}: {name} has no option; write {name}")
    try:
        converted = entry.convert(value)
    except UsageError:  # its message is more specific
        raise
    except ValueError:
        example = getattr(entry.make(), entry.option)
        raise UsageError(
            f"{kind}={text!r}: {value!r} is no valid {entry.option}; write for example "
            f"{name}@{example}"
        ) from None
    return entry.make(**{entry.option: converted})


def check_call(
    name: str,
    unnamed: tuple[Any, ...],
    options: Mapping[str, Any],
    known: Mapping[str, Any],
    instead: Mapping[str, str] | None = None,
) -> None:
    """Raise a `UsageError` in place of a `TypeError`, which suggests no option.

    ``instead`` has what to write for options that do not exist here.
    """
    if unnamed:
        raise _unnamed(name, unnamed[0], known)
    for key, value in options.items():
        if key not in known:
            place = f"{name}({key}={_short(value)})"
            raise _unknown_option(key, known, place, instead)


def _unknown_option(
    key: str, known: Iterable[str], where: str, instead: Mapping[str, str] | None
) -> UsageError:
    former = instead or {}
    near = key if key in former else nearest(key.lower(), [*known, *former])
    hint = former.get(near, "")
    if hint and near != key:
        hint = f"{near}: {hint}"
    if key == "wire" and "compression" in known:  # its former name
        hint = "write compression"
    return unknown("option", key, known, where=where, instead=hint)


def kinds_of(cls: Any) -> dict[str, Callable[..., Any]]:
    """Return the parser of each option."""
    return {f.name: f.metadata.get(READ, type(f.default)) for f in fields(cls)}


def count_of(text: str) -> int | None:
    """Parse a number, or ``none``.

    >>> count_of("18"), count_of("none")
    (18, None)
    """
    return None if text.lower() == "none" else int(text)


def number_of(text: str) -> float | None:
    """Parse a number, or ``none``.

    >>> number_of("0.5"), number_of("none")
    (0.5, None)
    """
    return None if text.lower() == "none" else float(text)


_ALLOWED: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    count_of: "a whole number or none",
    number_of: "a number or none",
}
"""What an option takes, by the function that parses it."""


def read_options(
    text: str, kinds: dict[str, Any], *, where: str, instead: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Parse ``key=value,key=value``; raise a `UsageError` for an unknown key or invalid value."""
    out: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        key, eq, value = item.partition("=")
        if key not in kinds:
            raise _unknown_option(key, kinds, repr(where), instead)
        if not eq or not value:
            raise UsageError(f"option {key!r} in {where!r} has no value; write {key}=VALUE")
        out[key] = _convert(kinds[key], key, value, where)
    return out


def _convert(kind: Callable[[str], Any], key: str, value: str, where: str) -> Any:
    if kind is bool:
        if value.lower() not in ("true", "false"):
            raise UsageError(f"option {key}={value!r} in {where!r}: allowed are true and false")
        return value.lower() == "true"
    if kind is tuple:
        return _groups(key, value, where)
    try:
        return kind(value)
    except UsageError:  # its message is more specific
        raise
    except ValueError:
        allowed = _ALLOWED.get(kind)
        raise UsageError(
            f"option {key}={value!r} in {where!r} is no valid "
            + (f"value: it takes {allowed}" if allowed else getattr(kind, "__name__", "value"))
        ) from None


def _groups(key: str, text: str, where: str) -> tuple[tuple[str, float], ...]:
    """Parse ``PATTERN@DENSITY+PATTERN@DENSITY``; commas separate options."""
    found = []
    for item in text.split("+"):
        pattern, _, density = item.rpartition("@")
        try:
            found.append((pattern, float(density)))
        except ValueError:
            pattern = ""
        if not pattern:
            raise UsageError(
                f"option {key}={text!r} in {where!r}: {item!r} is no group; write "
                "PATTERN@DENSITY, several with + between, such as embedding.*@0.01+*.bias@1"
            )
    return tuple(found)


def _unnamed(name: str, value: Any, known: Mapping[str, Any]) -> UsageError:
    """Return the error for a positional value; its example is an option of the same type."""
    if not known:
        return UsageError(f"{name}({_short(value)}): there are no options; write {name}()")
    kinds = {int, float} if is_number(value) else {type(value)}
    fits = [key for key, default in known.items() if type(default) in kinds]
    key = next(iter(fits or known))
    shown = _short(value) if fits else repr(known[key])
    return UsageError(
        f"{name}({_short(value)}): options are given by name, such as {name}({key}={shown}); "
        f"allowed: {', '.join(sorted(known))}"
    )


def _short(value: Any) -> str:
    """Return the value's repr, shortened to one line: the value may be a model."""
    return " ".join(_SHORT.repr(value).split())


def is_number(value: Any) -> TypeGuard[float]:
    """Whether ``value`` is a finite number and not a bool."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False


def _scaled(size: float, factor: float, default: Any) -> float:
    """Scale a size in MB, or a number of elements if the default is an int; 0 stays 0."""
    if size and isinstance(default, int):
        return max(1, round(factor * size))
    return factor * size if size else size
