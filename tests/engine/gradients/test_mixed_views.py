"""Gradients that differ between workers are shown, and nothing may be added to them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from wingbeat.engine.gradients.bucket import Bucket, Slot
from wingbeat.engine.gradients.views import MixedGradients
from wingbeat.errors import UsageError


def shown() -> tuple[MixedGradients, list[Slot]]:
    """Views after an exchange, of two parameters; the optimizer updates the first one."""
    slots = [Slot(i, f"p{i}", torch.nn.Parameter(torch.ones(3))) for i in range(2)]
    bucketing: Any = SimpleNamespace(slots=slots, buckets=[Bucket(0, slots)])
    views = MixedGradients(bucketing, lambda param: param is slots[0].param)
    views.begin()
    for slot in slots:
        slot.used = True
        views.taken(slot)
    views.show()
    return views, slots


def test_what_was_exchanged_must_be_dropped_first() -> None:
    views, slots = shown()
    for _ in range(2):
        with pytest.raises(UsageError, match=r"'p0' .* before each backward call optimizer\.zero"):
            views.begin()
    slots[0].param.grad = None
    with pytest.raises(UsageError, match=r"'p1' .* before each backward call model\.zero_grad"):
        views.begin()
    slots[1].param.grad = torch.ones(3)  # somebody's own
    views.begin()


def test_what_the_optimizer_has_zeroed_in_place_may_be_added_to() -> None:
    views, slots = shown()
    views.zeroed(set_to_none=False)
    with pytest.raises(UsageError, match="'p1'"):
        views.begin()
    slots[1].param.grad = None
    views.begin()
    views.show()
    with pytest.raises(UsageError, match="'p0'"):
        views.begin()
