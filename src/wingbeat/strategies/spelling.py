"""How a strategy is written on the command line: ``name`` or ``name:key=value,key=value``.

The name is the class's in lower case and the keys are its fields, so that there is one list of
both; ``strategy`` is a composition of one's own:

>>> parse("dear:mb=10")
DeAR(mb=10.0)
>>> parse("strategy:plan=merged,wire=sketch@4,schedule=dear")
Strategy(plan=Merged(), wire=Sketch(bits=4), schedule=Decoupled())
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from wingbeat.errors import UsageError, unknown
from wingbeat.settings import READ
from wingbeat.strategies.preset import Preset
from wingbeat.strategies.presets import PRESETS
from wingbeat.strategies.strategy import Strategy

_CLASSES: dict[str, Any] = {**PRESETS, "strategy": Strategy}


def names() -> list[str]:
    """Return the strategies' names as the command line spells them."""
    return list(_CLASSES)


def parse(text: str) -> Preset | Strategy:
    """Turn ``name`` or ``name:key=value,key=value`` into the dataclass that Python users write.

    Raises:
        UsageError: an unknown name or key, or a value of the wrong kind; names the nearest match.
    """
    name, _, rest = text.partition(":")
    if name.lower() not in _CLASSES:
        raise unknown("strategy", name, _CLASSES)
    cls = _CLASSES[name.lower()]
    kinds = {f.name: f.metadata.get(READ, type(f.default)) for f in fields(cls)}
    made: Preset | Strategy = cls(**options(rest, kinds, where=text))
    return made


def options(text: str, kinds: dict[str, Any], *, where: str) -> dict[str, Any]:
    """Parse ``key=value,key=value`` with each value converted to its field's type.

    Raises:
        UsageError: an unknown key, a missing value, or one that does not convert.
    """
    out: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        key, eq, value = item.partition("=")
        if key not in kinds:
            raise unknown("option", key, kinds, where=repr(where))
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
    except UsageError:  # it says more
        raise
    except ValueError:
        kind_name = getattr(kind, "__name__", "value")
        raise UsageError(f"option {key}={value!r} in {where!r} is no valid {kind_name}") from None


def _groups(key: str, text: str, where: str) -> tuple[tuple[str, float], ...]:
    """Read ``PATTERN@DENSITY+PATTERN@DENSITY``; commas would end the option."""
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
