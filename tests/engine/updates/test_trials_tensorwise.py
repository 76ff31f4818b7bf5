"""Which optimizers can be divided by whole parameters, and what is said of those that cannot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import optim

from helpers.training import distributed, net, on
from wingbeat.engine.updates.trials import find_dependence, prove_elementwise, prove_tensorwise
from wingbeat.errors import UsageError
from wingbeat.methods.model_averaging.flat import ElementState


class Own(optim.Optimizer):
    """One update for each parameter, scaled by its norm."""

    def __init__(self, params: Any, lr: float = 0.1, **settings: Any) -> None:
        super().__init__(params, {"lr": lr, **settings})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(group, param, self.state[param])

    def update(self, group: Any, param: Any, state: Any) -> None:
        param.sub_(param.grad * group["lr"] / (1 + param.grad.norm()))


class CountsInGroups(Own):
    def update(self, group: Any, param: Any, state: Any) -> None:
        super().update(group, param, state)
        group["steps"] = group.get("steps", 0) + 1


class LooksOnce(Own):
    """As Adam-mini: checks names in its first step, and remembers that it did."""

    looked = False

    def step(self, closure: Any = None) -> Any:
        self.looked = True
        return super().step(closure)


class CountsCalls(Own):
    made = 0

    def step(self, closure: Any = None) -> Any:
        self.made += 1
        return super().step(closure)


class ByAll(Own):
    """Divides by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        for grad in grads:
            grad.div_(norm)
        return super().step(closure)


class KeepsGradients(Own):
    def update(self, group: Any, param: Any, state: Any) -> None:
        super().update(group, param, state)
        state["seen"] = {"last": [param.grad]}


class KeepsObjects(Own):
    def update(self, group: Any, param: Any, state: Any) -> None:
        super().update(group, param, state)
        state["seen"] = [object]


class Noisy(Own):
    def update(self, group: Any, param: Any, state: Any) -> None:
        param.sub_(torch.randn_like(param) * group["lr"])


class Exchanging(Own):
    """As distributed Muon: divides its work by itself."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                dist.all_gather([torch.empty_like(param)], param)


class WithModes(Own):
    """As schedule-free optimizers: refuses to step unless it was told to train."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, train_mode=False, k=0)

    def train(self) -> None:
        for group in self.param_groups:
            group["train_mode"] = True

    def step(self, closure: Any = None) -> Any:
        if not self.param_groups[0]["train_mode"]:
            raise RuntimeError("not in train mode")
        super().step(closure)
        for group in self.param_groups:
            group["k"] += 1


@pytest.fixture
def alone() -> Iterator[None]:
    """A default process group of this process, as `wingbeat.init` makes one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", [Own, LooksOnce, optim.Adafactor])
def test_tensorwise_optimizers_pass(kind: Any) -> None:
    prove_tensorwise(kind(net().parameters()))


WHY = [
    (CountsInGroups, "it keeps state in its param groups: steps"),
    (CountsCalls, "it keeps state outside of its state dict: made"),
    (ByAll, "what it does to one parameter depends on the others, or on random numbers"),
    (Noisy, "what it does to one parameter depends on the others, or on random numbers"),
    (KeepsGradients, "it keeps gradients themselves, whose memory is reused"),
    (KeepsObjects, "its state: a type cannot be sent to the other workers"),
    (WithModes, "it keeps state in its param groups: train_mode, k"),
    (Exchanging, "it exchanges tensors with other workers by itself (allgather)"),
]


@pytest.mark.parametrize(("kind", "why"), WHY)
@pytest.mark.usefixtures("alone")
def test_other_optimizers_are_refused_with_the_reason(kind: Any, why: str) -> None:
    with pytest.raises(UsageError) as found:
        prove_tensorwise(kind(net().parameters()))
    assert str(found.value) == (
        f"DeAR(shard_optimizer=True): the work of optimizer {kind.__name__} cannot be divided "
        f"among the workers: {why}; leave shard_optimizer out"
    )


@pytest.mark.usefixtures("alone")
def test_every_trial_fails_if_an_optimizer_calls_collectives() -> None:
    """On a group of other processes it would wait for them, or change what they try."""
    optimizer = Exchanging(net().parameters())
    why = r"it exchanges tensors with other workers by itself \(allgather\)"
    assert find_dependence(optimizer) == why.replace("\\", "")
    with pytest.raises(UsageError, match=why):
        prove_elementwise(optimizer, Exchanging.step)
    model = net()
    with pytest.raises(UsageError, match=why):
        ElementState(Exchanging(model.parameters()), {p: n for n, p in model.named_parameters()})


def test_a_trial_changes_nothing() -> None:
    optimizer = LooksOnce(net().parameters())
    random, attributes = torch.get_rng_state(), dict(vars(optimizer))
    prove_tensorwise(optimizer)
    assert vars(optimizer) == attributes
    assert not optimizer.looked
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), random)


def test_distribute_refuses_and_leaves_plain_objects() -> None:
    def body(world: Any) -> None:
        model = net()
        with pytest.raises(UsageError, match="the work of optimizer WithModes cannot be divided"):
            distributed(world, WithModes, model)
        assert not list(model._forward_pre_hooks)
        distributed(world, WithModes, model, shard_optimizer=False)

    on(2, body)
