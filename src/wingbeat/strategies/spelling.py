"""How a strategy is written on the command line: ``name`` or ``name:key=value,key=value``.

The name is the class's in lower case and the keys are its fields, so that there is one list of
both; ``strategy`` is a composition of one's own:

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
    """Return the strategies' names as the command line spells them."""
    return list(_classes(presets))


def parse(text: str, presets: Presets = PRESETS) -> Preset | Strategy:
    """Turn ``name`` or ``name:key=value,key=value`` into the dataclass that Python users write.

    Args:
        text: what the command line has.
        presets: the presets that ``text`` may name, by their names in lower case.

    Raises:
        UsageError: an unknown name or key, or a value of the wrong kind; names the nearest match.
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
