"""Small profiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from wingbeat.profiling import Parameter, Profile, ProfiledLayer

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


def dense_profile(layers: int = 3, **fields: str) -> Profile:
    """Return a profile of layers of 500 x 500 elements, each with 10 ms forward, 20 backward."""
    rows = tuple(
        ProfiledLayer(f"l{n}", "linear", (Parameter("weight", (500, 500)),), 10.0, 20.0)
        for n in range(layers)
    )
    profile = Profile(
        name="dense",
        device="AMD EPYC, 2 threads, float32",
        batch_size=3,
        samples_per_second=100.0 / layers,
        source="invented for a test",
        shapes_from="nowhere",
        split="by hand",
        layers=rows,
    )
    return replace(profile, **fields)  # type: ignore[arg-type]
