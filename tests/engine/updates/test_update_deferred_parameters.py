"""Parameters whose update is due: every way to read one gets it updated first."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from wingbeat.engine.updates.update import DeferredParameters


class Updates:
    """Fills parameters with ones when they are about to be read."""

    def __init__(self) -> None:
        self.asked: list[torch.Tensor] = []
        self.stale = DeferredParameters(self.update)

    def update(self, params: list[torch.Tensor]) -> None:
        self.asked += params
        self.stale.clear(params)
        with torch.no_grad():
            for param in params:
                param.fill_(1.0)


def _marked() -> tuple[Updates, nn.Parameter]:
    updates, param = Updates(), nn.Parameter(torch.zeros(3))
    updates.stale.mark([param])
    return updates, param


def _pickled(param: nn.Parameter) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(param, file)
    file.seek(0)
    loaded: torch.Tensor = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize(
    "read",
    [
        lambda p: p + 0,
        lambda p: p.data,
        lambda p: p.detach(),
        lambda p: p.type(dtype=torch.float64).float(),
        lambda p: torch.stack([torch.zeros(3), p])[1],
        lambda p: nn.functional.linear(torch.eye(3), weight=p[None]).T[0],
        lambda p: torch.tensor(p.tolist()),
        lambda p: torch.from_numpy(p.detach().numpy()),
        copy.deepcopy,
        _pickled,
    ],
)
def test_a_read_gets_the_updated_values(read: Callable[[Any], torch.Tensor]) -> None:
    updates, param = _marked()
    got = read(param)
    assert torch.equal(got.detach(), torch.ones(3))
    assert len(updates.asked) == 1
    assert updates.asked[0] is param
    assert type(param) is nn.Parameter
    assert type(got) in (nn.Parameter, torch.Tensor)


def test_metadata_access_updates_nothing() -> None:
    updates, param = _marked()
    assert param.shape == (3,)
    assert param.grad is None
    assert param.requires_grad
    assert isinstance(param, nn.Parameter)
    assert len({param}) == 1
    assert not updates.asked
    updates.stale.clear([param])
    assert not param.detach().any()


def test_marking_twice_is_marking_once() -> None:
    updates, param = _marked()
    updates.stale.mark([param])
    assert float(param.sum()) == 3.0
    assert len(updates.asked) == 1
    assert type(param) is nn.Parameter


def test_a_marked_parameter_without_owner_keeps_its_values() -> None:
    updates, param = _marked()
    gone = weakref.ref(updates)
    del updates
    gc.collect()
    assert gone() is None, "marking must not keep the engine alive"
    assert float(param.sum()) == 0.0
    assert type(param) is nn.Parameter


def test_parameters_left_marked_by_a_refresh_are_cleared() -> None:
    class Forgetful:
        def update(self, params: list[torch.Tensor]) -> None:
            self.called = True

    owner = Forgetful()
    stale, param = DeferredParameters(owner.update), nn.Parameter(torch.zeros(3))
    stale.mark([param])
    assert float(param.sum()) == 0.0
    assert owner.called
    assert type(param) is nn.Parameter


class Own(nn.Parameter):
    """A class of someone's own."""


class Guarded(nn.Parameter):
    """One that cannot be exchanged."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__":
            raise TypeError("no")
        super().__setattr__(name, value)


def test_can_mark_leaves_parameters_unmarked() -> None:
    updates = Updates()
    plain, own = nn.Parameter(torch.zeros(3)), Own(torch.zeros(3))
    assert updates.stale.can_mark([plain, own])
    assert type(plain) is nn.Parameter
    assert type(own) is Own
    guarded = Guarded(torch.zeros(3))
    assert not updates.stale.can_mark([plain, guarded])
    assert type(plain) is nn.Parameter
    assert not updates.asked


def test_an_exception_in_the_update_reaches_the_reader() -> None:
    class Broken:
        def update(self, params: list[torch.Tensor]) -> None:
            raise ArithmeticError

    owner = Broken()
    stale, param = DeferredParameters(owner.update), nn.Parameter(torch.zeros(3))
    stale.mark([param])
    for _ in range(2):  # and again: it is still due
        with pytest.raises(ArithmeticError):
            param.sum()
