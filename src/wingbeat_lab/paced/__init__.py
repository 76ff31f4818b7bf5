"""Paced models: real parameters and gradients, emulated compute.

The cores of a laptop cannot emulate eight GPUs. A paced model has the layers of a known network, in
order and with their parameter shapes, and sleeps for the forward and backward time of each layer on
a stated device. Communication is real.

Profiles load without torch; only :class:`PacedModel` and :func:`simulator_model` import it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wingbeat.profiling import Parameter, Profile, ProfiledLayer
from wingbeat_lab.paced.profile import load_profile, names, parse, table

if TYPE_CHECKING:
    from wingbeat.profiling import simulator_model
    from wingbeat_lab.paced.model import PacedModel

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


if not TYPE_CHECKING:  # a type checker would find every name here

    def __getattr__(name: str) -> Any:
        if name == "simulator_model":
            from wingbeat.profiling import simulator_model

            return simulator_model
        if name == "PacedModel":
            from wingbeat_lab.paced.model import PacedModel

            return PacedModel
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
