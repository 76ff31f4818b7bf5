"""Kernels of sketches and top-k: three implementations of the same functions.

``reference`` uses torch operations, ``native`` C++, and ``gpu`` Triton. ``layout`` defines the
format of payloads. All tensors are flat, contiguous and on one device.
"""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

from wingbeat.observe.log import log

if TYPE_CHECKING:
    import torch

__all__ = ["of"]

_FAST = {"cpu": "native", "cuda": "gpu"}


def of(device: torch.device) -> ModuleType:
    """Return the fastest kernels that can be imported for a device."""
    return _of(device.type)


@cache
def _of(device_type: str) -> ModuleType:
    name = _FAST.get(device_type, "reference")
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ImportError as err:
        log.warning(
            "codecs use the slow kernels for %s: %s cannot be imported (%s)", device_type, name, err
        )
        return importlib.import_module(f"{__name__}.reference")
