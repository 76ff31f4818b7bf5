"""Paced models: real parameters, real gradients' bytes, emulated compute.

A laptop's cores cannot stand for eight GPUs. A paced model has the layers of a known network,
in their order and with their parameter shapes, and sleeps for each layer's forward and backward
time as a stated device would need them. Communication stays real.

Profiles load without torch; only :class:`PacedModel` and :func:`simulator_model` import it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wingbeat_lab.paced.profile import Parameter, Profile, ProfiledLayer, load_profile, names, parse
from wingbeat_lab.paced.summary import table

if TYPE_CHECKING:
    from wingbeat_lab.paced.model import PacedModel
    from wingbeat_lab.paced.simulated import simulator_model

__all__ = [
    "PacedModel",
    "Parameter",
    "Profile",
    "ProfiledLayer",
    "load_profile",
    "names",
    "parse",
    "simulator_model",
    "table",
]


def __getattr__(name: str) -> Any:
    if name == "PacedModel":
        from wingbeat_lab.paced.model import PacedModel

        return PacedModel
    if name == "simulator_model":
        from wingbeat_lab.paced.simulated import simulator_model

        return simulator_model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
