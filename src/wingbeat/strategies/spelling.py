"""The textual form of strategies: ``name`` or ``name:key=value,key=value``.

The name is that of the class in lower case, and the keys are its fields. ``strategy`` is a custom
composition:

>>> parse("dear:mb=10")
DeAR(mb=10.0)
>>> parse("strategy:plan=merged,compression=sketch@4,schedule=dear")
Strategy(plan=Merged(), compression=Sketch(bits=4), schedule=Decoupled())
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wingbeat.errors import unknown
from wingbeat.settings import kinds_of, read_options
from wingbeat.strategies.preset import Preset
from wingbeat.strategies.presets import PRESETS
from wingbeat.strategies.strategy import Strategy

Presets = Mapping[str, type[Preset]]


def names(presets: Presets = PRESETS) -> list[str]:
    """Return the names of all strategies on the command line."""
    return list(_classes(presets))


def parse(text: str, presets: Presets = PRESETS) -> Preset | Strategy:
    """Convert ``name`` or ``name:key=value,key=value`` to a strategy.

    Args:
        text: the textual form.
        presets: the allowed presets by their names in lower case.

    Raises:
        UsageError: an unknown name or key, or a value of the wrong type; gives the nearest match.
    """
    name, _, rest = text.partition(":")
    classes = _classes(presets)
    if name.lower() not in classes:
        raise unknown("strategy", name, classes)
    cls = classes[name.lower()]
    made: Preset | Strategy = cls(**read_options(rest, kinds_of(cls), where=text))
    return made


def _classes(presets: Presets) -> dict[str, Any]:
    return {**presets, "strategy": Strategy}
