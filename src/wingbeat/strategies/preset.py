"""What all presets share: they are functions of named options that return a `Strategy`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, cast

from wingbeat.parts.strategy import Strategy
from wingbeat.settings import MAX_MB, OptionError, check_call, defaults_of, is_number, shown

P = ParamSpec("P")

Preset = Callable[..., Strategy]
Readers = Mapping[str, Callable[[str], Any]]


def preset(
    *,
    readers: Readers | None = None,
    keys: Mapping[str, str] | None = None,
    instead: Mapping[str, str] | None = None,
) -> Callable[[Callable[P, Strategy]], Callable[P, Strategy]]:
    """Make a function of keyword-only options a preset.

    Its strategies have the repr of the call. An error about an option of a part names the preset
    and its own option.

    Args:
        readers: by option, the parser of its textual form, if its default's type cannot parse it.
        keys: the preset's name for options of parts, where it differs.
        instead: by an option that others have, or earlier versions had, what to write.
    """

    def decorate(make: Callable[P, Strategy]) -> Callable[P, Strategy]:
        known, name = defaults_of(make), make.__name__

        @functools.wraps(make)
        def made(*unnamed: P.args, **options: P.kwargs) -> Strategy:
            check_call(name, unnamed, options, known, instead)
            try:
                strategy = make(*unnamed, **options)
            except OptionError as error:
                own, given = error.renamed(name, keys or {}), {**known, **options}
                # Else the option is one of a part that was given, or a fixed one.
                mine = all(repr(given.get(k)) == repr(v) for k, v in own.options.items())
                raise (own if mine else error) from None
            # In the order of the signature: ranks compare strategies by their repr.
            changed = [k for k, v in known.items() if options.get(k, v) != v]
            call = ", ".join(f"{key}={shown(options[key])}" for key in changed)
            return strategy.called(f"{name}({call})")

        made.preset = readers or {}, keys or {}, instead or {}  # type: ignore[attr-defined]
        return made

    return decorate


def variant(
    base: Callable[P, Strategy], fixed: Mapping[str, Any] | None = None, **defaults: Any
) -> Callable[[Callable[..., object]], Callable[P, Strategy]]:
    """Make a preset of another one with other ``defaults``; ``fixed`` are no options of it.

    The decorated function has the name and the docstring, and may check the options.
    """
    readers, keys, instead = base.preset  # type: ignore[attr-defined]
    make: Callable[..., Strategy] = base.__wrapped__  # type: ignore[attr-defined]
    signature = inspect.signature(make)
    parameters = [
        parameter.replace(default=defaults.get(name, parameter.default))
        for name, parameter in signature.parameters.items()
        if name not in (fixed or {})
    ]

    def decorate(described: Callable[..., object]) -> Callable[P, Strategy]:
        @functools.wraps(described)
        def own(**options: Any) -> Strategy:
            described(**options)
            return make(**{**defaults, **options, **(fixed or {})})

        own.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        del own.__wrapped__
        others = dict.fromkeys(fixed or (), f"{base.__name__} has it")
        made = preset(readers=readers, keys=keys, instead={**instead, **others})
        return made(cast("Callable[P, Strategy]", own))

    return decorate


def kinds_of(made: Preset) -> dict[str, Callable[[str], Any]]:
    """Return the parser of each option's textual form."""
    readers: Readers = made.preset[0]  # type: ignore[attr-defined]
    return {key: readers.get(key, type(value)) for key, value in defaults_of(made).items()}


def instead_of(made: Preset) -> Mapping[str, str]:
    """Return, by an option that the preset does not have, what to write."""
    instead: Mapping[str, str] = made.preset[2]  # type: ignore[attr-defined]
    return instead


def check_flags(**flags: object) -> None:
    """Raise a `UsageError` unless all are True or False."""
    for key, value in flags.items():
        if not isinstance(value, bool):
            raise OptionError.of("", {key: value}, "allowed are True and False")


def check_first_mb(first_mb: object) -> None:
    """Raise a `UsageError` unless it is a size above 0; the parts allow 0 too."""
    if not is_number(first_mb) or not 0 < first_mb <= MAX_MB:
        raise OptionError.of(
            "", {"first_mb": first_mb}, f"allowed are sizes above 0 up to {MAX_MB} MB"
        )
