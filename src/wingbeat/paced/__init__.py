"""Paced models: real parameters, real gradients' bytes, emulated compute.

A laptop's cores cannot stand for eight GPUs. A paced model has the layers of a known network,
in their order and with their parameter shapes, and sleeps for each layer's forward and backward
time as a stated device would need them. Communication stays real.

Profiles load without torch; only :class:`PacedModel` imports it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wingbeat.paced.profile import Parameter, Profile, ProfiledLayer, load_profile, names, parse
from wingbeat.paced.summary import table

if TYPE_CHECKING:
    from wingbeat.paced.model import PacedModel

__all__ = [
    "PacedModel",
    "Parameter",
    "Profile",
    "ProfiledLayer",
    "load_profile",
    "names",
    "parse",
    "table",
]


def __getattr__(name: str) -> Any:
    if name == "PacedModel":
        from wingbeat.paced.model import PacedModel

        return PacedModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
