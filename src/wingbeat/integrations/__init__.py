"""Integrations with other training libraries, imported on first use."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = [
    "accelerate",
    "checkpoint",
    "ddp",
    "fabric",
    "lightning",
    "lightning_fabric",
    "pytorch_lightning",
    "transformers",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'wingbeat.integrations' has no attribute {name!r}")
    return importlib.import_module(f"wingbeat.integrations.{name}")
