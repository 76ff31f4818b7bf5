"""A small profile."""

from __future__ import annotations

from typing import Any

TINY: dict[str, Any] = {
    "name": "tiny",
    "device": "none",
    "batch_size": 2,
    "samples_per_second": 100.0,
    "source": "invented for a test",
    "shapes_from": "nowhere",
    "split": "by hand",
    "layers": [
        {
            "name": "a.b",
            "kind": "linear",
            "parameters": {"weight": [8, 4], "bias": [8]},
            "forward_ms": 6.0,
            "backward_ms": 14.0,
        }
    ],
}
