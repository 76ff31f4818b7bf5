"""A wrong argument is a ValueError that names it, before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from wingbeat.kernels import layout

from .rig import Kernels

N, K, BITS = 500, 20, 8
ENCODERS, DECODERS = ("sketch_encode", "topk_encode"), ("sketch_decode", "topk_decode")


def arguments(function: str, device: torch.device) -> dict[str, Any]:
    """What ``function`` takes, all of it right."""
    kind, _, verb = function.partition("_")
    nbytes = layout.sketch_bytes(N, BITS) if kind == "sketch" else layout.topk_bytes(N, K)
    given: dict[str, Any] = {"payload": torch.zeros(nbytes, dtype=torch.uint8, device=device)}
    given |= {"bits": BITS} if kind == "sketch" else {"k": K}
    if verb == "decode":
        return given | {"out": torch.zeros(N, device=device)}
    given |= {"x": torch.ones(N, device=device), "residual": torch.zeros(N, device=device)}
    return given if kind == "sketch" else given | {"velocity": torch.zeros(N, device=device)}


WRONG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dtype": lambda t: t.to(torch.float64),
    "one more": lambda t: torch.cat([t, t[:1]]),
    "one fewer": lambda t: t[:-1],
    "not contiguous": lambda t: t.repeat_interleave(2)[::2],
    "not flat": lambda t: t.view(2, -1),
}
TENSORS = [
    *((function, name) for function in ENCODERS for name in ("x", "payload", "residual")),
    *((function, name) for function in DECODERS for name in ("out", "payload")),
    ("topk_encode", "velocity"),
]


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(("function", "name"), TENSORS)
def test_tensors(kernels: Kernels, function: str, name: str, wrong: str) -> None:
    given = arguments(function, kernels.device)
    given[name] = WRONG[wrong](given[name])
    before = {key: t.clone() for key, t in given.items() if isinstance(t, torch.Tensor)}
    # A wrong number of values is seen as a payload, or others, that do not fit to it.
    named = r"payload|residual|velocity" if name in ("x", "out") and "one" in wrong else name
    with pytest.raises(ValueError, match=rf"\b({named})\b"):
        getattr(kernels.module, function)(**given)
    assert all(torch.equal(given[key], t) for key, t in before.items())


@pytest.mark.parametrize(
    ("function", "name", "value"),
    [
        ("sketch_encode", "bits", 0),
        ("sketch_encode", "bits", 9),
        ("sketch_decode", "bits", -1),
        ("sketch_encode", "split", "equal"),
        ("sketch_encode", "level", "median"),
        ("topk_encode", "k", 0),
        ("topk_encode", "k", N + 1),
        ("topk_decode", "k", -3),
    ],
)
def test_values(kernels: Kernels, function: str, name: str, value: Any) -> None:
    given = arguments(function, kernels.device)
    given[name] = value
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        getattr(kernels.module, function)(**given)


def test_velocity_needs_a_residual(kernels: Kernels) -> None:
    given = arguments("topk_encode", kernels.device)
    del given["residual"]
    with pytest.raises(ValueError, match="residual"):
        kernels.module.topk_encode(**given)


def test_right_ones_are_accepted(kernels: Kernels) -> None:
    for function in (*ENCODERS, *DECODERS):
        given = arguments(function, kernels.device)
        if function == "topk_decode":
            kernels.module.topk_encode(torch.ones(N, device=kernels.device), given["payload"], k=K)
        getattr(kernels.module, function)(**given)
