"""Profiles: the layers of a model with their parameters and times, in a file.

The simulator, ``wingbeat_lab.paced`` and the bench read the same files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wingbeat.profiling.profile import Parameter, Profile, ProfiledLayer, decode, encode

if TYPE_CHECKING:
    from wingbeat.profiling.simulated import simulator_model

__all__ = ["Parameter", "Profile", "ProfiledLayer", "decode", "encode", "simulator_model"]


if not TYPE_CHECKING:  # a type checker would find every name here

    def __getattr__(name: str) -> Any:
        if name == "simulator_model":  # the simulator imports torch
            from wingbeat.profiling.simulated import simulator_model

            return simulator_model
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
