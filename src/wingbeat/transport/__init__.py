"""Transport layer: process groups, messages, NCCL on GPUs, and an in-memory loopback for tests.

Names are loaded on first use, so that `wingbeat.transport.messages` needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wingbeat.transport.graceful_shutdown import on_terminate as on_terminate
    from wingbeat.transport.rendezvous import init as init
    from wingbeat.transport.rendezvous import shutdown as shutdown
    from wingbeat.transport.world import World as World
    from wingbeat.transport.world import current as current

_HOME = {
    "World": "world",
    "current": "world",
    "init": "rendezvous",
    "on_terminate": "graceful_shutdown",
    "shutdown": "rendezvous",
}

__all__ = ["World", "current", "init", "on_terminate", "shutdown"]


if not TYPE_CHECKING:  # a type checker would find every name here

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
