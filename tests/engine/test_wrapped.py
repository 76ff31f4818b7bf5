"""Models that something else averages too."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from wingbeat.engine.wrapped import refuse_around, refuse_inside, refuse_wrapping
from wingbeat.errors import UsageError


def test_a_wrapper_is_refused_by_name_wherever_it_is() -> None:
    inner = nn.DataParallel(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="the model is wrapped in DataParallel"):
        refuse_inside(inner)
    with pytest.raises(UsageError, match=r"module '1' of the model is wrapped in DataParallel"):
        refuse_inside(nn.Sequential(nn.Linear(2, 2), inner))
    refuse_inside(nn.Sequential(nn.Linear(2, 2)))


def test_only_a_model_inside_of_the_active_wrapper_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another model's DDP, in whose forward this one is used, is none of its business."""
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    refuse_around(model)
    monkeypatch.setattr(DistributedDataParallel, "_active_ddp_module", nn.Sequential(model))
    with pytest.raises(UsageError, match="averaged twice"):
        refuse_around(model)
    refuse_around(other)


def test_only_ddp_that_asks_is_refused() -> None:
    class Model:
        @property
        def ignored(self) -> Any:
            return refuse_wrapping()

    with pytest.raises(AttributeError):
        _ = Model().ignored
