"""The textual form of strategies: ``name`` or ``name:key=value,key=value``.

The name is that of the preset in lower case, and the keys are its options. ``strategy`` is a custom
composition:

>>> parse("dear:mb=10")
DeAR(mb=10.0)
>>> parse("strategy:plan=merged,compression=sketch@4,schedule=dear")
Strategy(plan=Merged(), compression=Sketch(bits=4), schedule=Decoupled())
"""

from __future__ import annotations

from collections.abc import Mapping

from wingbeat.errors import unknown
from wingbeat.parts.strategy import Strategy
from wingbeat.settings import defaults_of, read_options
from wingbeat.strategies.preset import Preset, instead_of, kinds_of
from wingbeat.strategies.presets import PRESETS

_OWN = "strategy"


def names(presets: Mapping[str, Preset] = PRESETS) -> list[str]:
    """Return the names of all strategies on the command line."""
    return [*presets, _OWN]


def parse(text: str, presets: Mapping[str, Preset] = PRESETS) -> Strategy:
    """Convert ``name`` or ``name:key=value,key=value`` to a strategy.

    Args:
        text: the textual form.
        presets: the allowed presets by their names in lower case.

    Raises:
        UsageError: an unknown name or key, or a value of the wrong type; gives the nearest match.
    """
    name, _, rest = text.partition(":")
    if name.lower() == _OWN:
        parts = dict.fromkeys(defaults_of(Strategy.__init__), str)
        return Strategy(**read_options(rest, parts, where=text))
    if name.lower() not in presets:
        raise unknown("strategy", name, names(presets))
    make = presets[name.lower()]
    return make(**read_options(rest, kinds_of(make), where=text, instead=instead_of(make)))
