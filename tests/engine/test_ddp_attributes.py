"""Attributes and methods of DistributedDataParallel that scripts use on what they have wrapped."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

import wingbeat
from helpers.training import TINY_MB, backward, net, on, sgd
from wingbeat.errors import MissingAttributeError, UsageError
from wingbeat.transport.loopback import Switchboard

STRATEGIES: dict[str, Any] = {
    "allreduce": wingbeat.AllReduce(mb=TINY_MB),
    "dear": wingbeat.DeAR(plan="fixed", mb=TINY_MB),
    "sharded": wingbeat.DeAR(plan="fixed", mb=TINY_MB, shard_optimizer=True),
    "sketch": wingbeat.AllReduce(compression=wingbeat.Sketch(auto_disable=False)),
    "geryon": wingbeat.Geryon(mb=TINY_MB, servers=1, encrypted=False),
    "server": wingbeat.Geryon(mb=TINY_MB, servers=1, update="server", encrypted=False),
    "canary": wingbeat.Canary(s=0),
    "local": wingbeat.LocalSGD(every=2),
}

BY_MESSAGES = ("geryon", "server", "canary", "local")
"""What these send does not go over links that a test can count at."""


def _made(world: Any, name: str, model: Any = None) -> tuple[Any, Any]:
    model = net() if model is None else model
    return wingbeat.distribute(model, sgd(model.parameters()), STRATEGIES[name], world=world)


def _accumulate(world: Any, name: str, how: str) -> dict[str, torch.Tensor]:
    """Four micro-batches a step, as nanoGPT has them; return the weights after three steps."""
    model, optimizer = _made(world, name)
    for step in range(3):
        for micro in range(4):
            quiet = micro < 3 and how != "always"
            if how == "attribute":
                model.require_backward_grad_sync = not quiet
                assert model.require_backward_grad_sync is not quiet
            context = model.no_sync() if quiet and how == "no_sync" else contextlib.nullcontext()
            with context:
                backward(model, world.rank, 4 * step + micro)
        optimizer.step()
        optimizer.zero_grad()
    wingbeat.synchronize(model)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every message that a link carries."""
    found: list[int] = []
    post = Switchboard.post

    def counted(self: Any, key: Any, tensor: torch.Tensor) -> None:
        found.append(tensor.nbytes)
        post(self, key, tensor)

    monkeypatch.setattr(Switchboard, "post", counted)
    return found


@pytest.mark.parametrize("name", STRATEGIES)
def test_require_backward_grad_sync_false_accumulates_as_no_sync(
    name: str, sent: list[int]
) -> None:
    """The same weights for the same bytes."""
    kinds = ["no_sync", "attribute"] + ["always"] * (name in ("allreduce", "dear"))
    weights, nbytes = {}, {}
    for how in kinds:
        sent.clear()
        weights[how] = on(2, lambda world, how=how: _accumulate(world, name, how))  # type: ignore[misc]
        nbytes[how] = sum(sent)
    for mine, other in zip(weights["attribute"], weights["no_sync"], strict=True):
        assert all(torch.equal(mine[key], other[key]) for key in other)
    if name not in BY_MESSAGES:
        assert nbytes["attribute"] == nbytes["no_sync"] > 0
    if "always" in kinds:
        assert nbytes["always"] > 3 * nbytes["attribute"]


def test_require_backward_grad_sync_is_not_in_the_state_dict() -> None:
    def body(world: Any) -> None:
        model, optimizer = _made(world, "dear")
        model.require_backward_grad_sync = False
        assert "require_backward_grad_sync" not in vars(model)
        with model.no_sync():
            pass
        assert model.require_backward_grad_sync is False
        wingbeat.release(model, optimizer)
        assert not hasattr(model, "require_backward_grad_sync")

    on(2, body)


def test_ddp_attributes_have_the_values_of_ddp() -> None:
    def body(world: Any) -> None:
        model, _ = _made(world, "dear")
        assert model.find_unused_parameters
        assert model.broadcast_buffers
        assert model.require_forward_param_sync
        assert not model.will_sync_module_buffers()
        assert model._set_static_graph() is None
        normed, _ = _made(world, "dear", nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
        assert normed.will_sync_module_buffers()
        for name in ("broadcast_buffers", "require_forward_param_sync"):
            setattr(normed, name, True)
            with pytest.raises(UsageError, match=rf"model.{name} = False: buffers stay"):
                setattr(normed, name, False)

    on(2, body)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("module", "distributed in place"),
        ("reducer", "mb="),
        ("logger", "wingbeat top"),
        ("process_group", r"wingbeat.init\(\)"),
        ("register_comm_hook", "compression="),
        ("_get_ddp_logging_data", "wingbeat top"),
    ],
)
def test_missing_ddp_attributes_are_refused_by_name(name: str, instead: str) -> None:
    def body(world: Any) -> None:
        model, _ = _made(world, "allreduce")
        with pytest.raises(MissingAttributeError, match=rf"model\.{name} is an .*: .*{instead}"):
            getattr(model, name)
        assert (model.module if hasattr(model, "module") else model) is model
        assert getattr(model, name, None) is None

    on(2, body)


class _Holder(nn.Module):
    """A module of the user's own, with names that DDP has too."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(6, 3)
        self.require_backward_grad_sync = "mine"

    def __getattr__(self, name: str) -> Any:
        if name == "reducer":
            return "mine"
        return super().__getattr__(name)

    def forward(self, x: torch.Tensor) -> Any:
        return self.module(x)


def test_a_model_keeps_its_own_attributes_of_these_names() -> None:
    def body(world: Any) -> None:
        model, optimizer = _made(world, "dear", _Holder())
        assert isinstance(model.module, nn.Linear)
        assert model.reducer == model.require_backward_grad_sync == "mine"
        model.require_backward_grad_sync = False  # its own: says nothing of gradients
        before = model.module.weight.detach().clone()
        backward(model, world.rank, 0)
        optimizer.step()
        assert not torch.equal(model.module.weight, before)
        with pytest.raises(AttributeError, match="'nonsense'"):
            _ = model.nonsense

    on(2, body)
