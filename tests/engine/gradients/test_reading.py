"""Which calls on a tensor read its values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from wingbeat.engine.gradients.reading import reads_values, tensors_in


class Spy(torch.Tensor):
    """Notes for each call on it whether it reads values."""

    seen: list[bool]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Spy.seen.append(reads_values(func, args, kwargs))
        return super().__torch_function__(func, types, args, kwargs or {})


def _reads(look: Any) -> bool:
    tensor = torch.ones(2, 2).as_subclass(Spy)
    Spy.seen = []
    look(tensor)
    assert Spy.seen, "nothing was called"
    return Spy.seen[0]


@pytest.mark.parametrize(
    "look",
    [
        lambda t: t.shape,
        lambda t: t.dtype,
        lambda t: t.grad,
        lambda t: setattr(t, "grad", None),
        lambda t: t.size(0),
        lambda t: t.numel(),
        lambda t: len(t),
        lambda t: t.is_contiguous(),
        lambda t: t.type(),
        lambda t: t.requires_grad_(),
        lambda t: t._version,
    ],
)
def test_looking_at_the_kind_reads_nothing(look: Any) -> None:
    assert not _reads(look)


@pytest.mark.parametrize(
    "look",
    [
        lambda t: t.data,
        lambda t: setattr(t, "data", torch.zeros(2, 2)),
        lambda t: t.T,
        lambda t: t.type(torch.float64),
        lambda t: t.type(dtype=torch.float64),
        lambda t: t.mul_(2),
        lambda t: t.data_ptr(),
        lambda t: t.tolist(),
        lambda t: t.clone(),
        lambda t: torch.add(1, t),
        lambda t: t.view(4),
        lambda t: t[0],
    ],
)
def test_taking_or_setting_values_does(look: Any) -> None:
    assert _reads(look)


def test_tensors_are_found_wherever_they_are() -> None:
    a, b, c, d = (torch.tensor(float(n)) for n in range(4))
    found = list(tensors_in(((a, [b, 1]), {"out": (c,), "more": {"deep": d}, "no": None})))
    assert [float(t) for t in found] == [0.0, 1.0, 2.0, 3.0]
