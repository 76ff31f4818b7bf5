"""Which optimizers can be divided is found out by trying, without disturbing them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

from helpers.training import assert_same, batch, distributed, net, on
from wingbeat.engine.updates.trials import prove_elementwise
from wingbeat.errors import UsageError

FINE: dict[str, tuple[Any, dict[str, Any], set[str]]] = {
    "sgd": (optim.SGD, {"lr": 0.1}, set()),
    "sgd_momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9}, {"momentum_buffer"}),
    "sgd_nesterov": (
        optim.SGD,
        {"lr": 0.0, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum_buffer"},
    ),
    "sgd_maximize": (optim.SGD, {"lr": 0.1, "maximize": True}, set()),
    "adam": (optim.Adam, {"lr": 0.1}, {"exp_avg", "exp_avg_sq"}),
    "adam_tensor_lr": (optim.Adam, {"lr": torch.tensor(0.1)}, {"exp_avg", "exp_avg_sq"}),
    "adamw_amsgrad": (
        optim.AdamW,
        {"lr": 0.1, "amsgrad": True},
        {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
    ),
    "adamw_fused": (optim.AdamW, {"lr": 0.1, "fused": True}, {"exp_avg", "exp_avg_sq"}),
    "adamw_foreach": (optim.AdamW, {"lr": 0.1, "foreach": True}, {"exp_avg", "exp_avg_sq"}),
    "adamw_single": (optim.AdamW, {"lr": 0.1, "foreach": False}, {"exp_avg", "exp_avg_sq"}),
    "rmsprop": (
        optim.RMSprop,
        {"lr": 0.1, "momentum": 0.5, "centered": True},
        {"square_avg", "momentum_buffer", "grad_avg"},
    ),
    "adagrad": (optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1}, {"sum"}),
    "adadelta": (optim.Adadelta, {"lr": 1.0}, {"square_avg", "acc_delta"}),
    "nadam": (optim.NAdam, {"lr": 0.1}, {"exp_avg", "exp_avg_sq"}),
    "radam": (optim.RAdam, {"lr": 0.1}, {"exp_avg", "exp_avg_sq"}),
    "adamax": (optim.Adamax, {"lr": 0.1}, {"exp_avg", "exp_inf"}),
    "rprop": (optim.Rprop, {"lr": 0.1}, {"prev", "step_size"}),
    "asgd": (optim.ASGD, {"lr": 0.1}, {"ax"}),
}


@pytest.mark.parametrize("name", FINE)
def test_elementwise_optimizers_pass(name: str) -> None:
    cls, options, each = FINE[name]
    found = prove_elementwise(cls(net().parameters(), **options), cls.step)
    assert {key for key, has_each in found.items() if has_each} == each
    assert found.get("step", False) is False


class _Own(optim.Optimizer):
    """A base for optimizers of this module: one update for each parameter."""

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, {"lr": 0.1, **defaults})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(group, param, self.state[param])

    def update(self, group: Any, param: Any, state: Any) -> None:
        raise NotImplementedError


class Lamb(_Own):
    """Scales each parameter's update by the parameter's norm."""

    def update(self, group: Any, param: Any, state: Any) -> None:
        trust = param.norm() / (param.grad.norm() + 1e-9)
        param.sub_(param.grad * group["lr"] * trust)


class ClipsItself(_Own):
    """Clips by the norm of each gradient, where that is large."""

    def update(self, group: Any, param: Any, state: Any) -> None:
        param.sub_(param.grad * group["lr"] * torch.clamp(1.0 / param.grad.norm(), max=1.0))


class Centralized(_Own):
    """Takes the mean off the gradients of convolutions only."""

    def update(self, group: Any, param: Any, state: Any) -> None:
        grad = param.grad
        if grad.dim() > 3:
            grad = grad - grad.mean(dim=(1, 2, 3), keepdim=True)
        param.sub_(grad * group["lr"])


class DecaysMatrices(_Own):
    """Leaves weight decay out for vectors, which flat parts of matrices look like."""

    def update(self, group: Any, param: Any, state: Any) -> None:
        if param.dim() > 1:
            param.mul_(0.9)
        param.sub_(param.grad * group["lr"])


class CountsInGroups(_Own):
    def update(self, group: Any, param: Any, state: Any) -> None:
        group["steps"] = group.get("steps", 0) + 1
        param.sub_(param.grad * group["lr"])


class CountsItsCalls(_Own):
    """Corrects a bias by a counter of its own, which parts would advance too often."""

    def update(self, group: Any, param: Any, state: Any) -> None:
        param.sub_(param.grad * group["lr"] / (1 - 0.5**self.calls))


class KeepsMeans(_Own):
    """A column mean for each matrix in its state, without using it."""

    def update(self, group: Any, param: Any, state: Any) -> None:
        state["mean"] = param.grad.reshape(-1, param.shape[-1]).mean(0)


class StoresAnObject(_Own):
    def update(self, group: Any, param: Any, state: Any) -> None:
        state["kept"] = object
        param.sub_(param.grad * group["lr"])


class SharedState(_Own):
    def update(self, group: Any, param: Any, state: Any) -> None:
        self.state["all"]["steps"] = 1


class Noisy(_Own):
    def update(self, group: Any, param: Any, state: Any) -> None:
        param.sub_(torch.randn_like(param) * group["lr"])


def _adafactor(params: Any) -> optim.Optimizer:
    return optim.Adafactor(params, lr=0.1)


def _muon(params: Any) -> optim.Optimizer:
    return optim.Muon([p for p in params if p.dim() == 2], lr=0.1)


REFUSED = [
    Lamb,
    ClipsItself,
    Centralized,
    DecaysMatrices,
    CountsInGroups,
    CountsItsCalls,
    KeepsMeans,
    StoresAnObject,
    SharedState,
    Noisy,
    optim.LBFGS,
    pytest.param(
        _adafactor,
        marks=pytest.mark.skipif(not hasattr(optim, "Adafactor"), reason="not in this torch"),
    ),
    pytest.param(
        _muon, marks=pytest.mark.skipif(not hasattr(optim, "Muon"), reason="not in this torch")
    ),
]


@pytest.mark.parametrize("make", REFUSED)
def test_optimizers_of_whole_parameters_are_refused_by_name(make: Any) -> None:
    optimizer = make(net().parameters())
    name = type(optimizer).__name__
    with pytest.raises(UsageError, match=f"optimizer {name} .*leave shard_optimizer out") as found:
        prove_elementwise(optimizer, type(optimizer).step)
    assert "\n" not in str(found.value)


def test_distribute_refuses_and_leaves_plain_objects() -> None:
    def body(world: Any) -> None:
        model = net()
        with pytest.raises(UsageError, match="optimizer Lamb"):
            distributed(world, Lamb, model)
        assert not list(model._forward_pre_hooks)
        distributed(world, Lamb, model, shard_optimizer=False)

    on(2, body)


def test_one_group_that_cannot_be_divided_is_found() -> None:
    class Mixed(Lamb):
        def update(self, group: Any, param: Any, state: Any) -> None:
            if group["lamb"]:
                super().update(group, param, state)
            else:
                param.sub_(param.grad * group["lr"])

    first, *rest = net().parameters()
    groups = [{"params": rest, "lamb": False}, {"params": [first], "lamb": True}]
    with pytest.raises(UsageError, match="Mixed"):
        prove_elementwise(Mixed(groups), Mixed.step)
    groups[1]["lamb"] = False
    prove_elementwise(Mixed(groups), Mixed.step)


@pytest.mark.parametrize("cls", [optim.AdamW, Noisy])
def test_elementwise_trial_changes_neither_optimizer_nor_parameters_nor_rng(cls: Any) -> None:
    model = net()
    optimizer = cls(model.parameters(), lr=0.0)
    model(batch(0, 0)).sum().backward()
    optimizer.step()
    calls: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    handle = register_optimizer_step_pre_hook(lambda *_: calls.append(2))
    before = copy.deepcopy((optimizer.state_dict(), list(model.parameters())))
    attributes = dict(vars(optimizer))
    random = torch.get_rng_state()
    try:
        prove_elementwise(optimizer, type(optimizer).step)
    except UsageError:
        assert cls is Noisy
    finally:
        handle.remove()
    assert_same(optimizer.state_dict(), before[0])
    assert_same([p.detach() for p in model.parameters()], [p.detach() for p in before[1]])
    assert torch.equal(torch.get_rng_state(), random)
    assert vars(optimizer) == attributes
    assert not calls


def test_elementwise_trial_with_learning_rate_zero_finds_its_state() -> None:
    optimizer = optim.SGD(net().parameters(), lr=0.1, momentum=0.9)
    scheduler = optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    assert optimizer.param_groups[0]["lr"] == 0.0, "as a warm-up begins"
    assert prove_elementwise(optimizer, optim.SGD.step) == {"momentum_buffer": True}
    assert scheduler.last_epoch == 0


@pytest.mark.parametrize("first", [0.0, 0.9])
def test_state_of_one_group_is_known_whatever_the_others_have(first: float) -> None:
    weight, *rest = net().parameters()
    groups = [
        {"params": [weight], "momentum": first},
        {"params": rest, "momentum": 0.9 - first},
    ]
    assert prove_elementwise(optim.SGD(groups, lr=0.1), optim.SGD.step) == {"momentum_buffer": True}


def test_elementwise_trial_of_equal_groups_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    plain = optim.AdamW.step.__wrapped__  # type: ignore[attr-defined]
    optimizer = optim.AdamW([{"params": [p], "lr": i} for i, p in enumerate(net().parameters())])

    def counted(self: Any, closure: Any = None) -> Any:
        steps.append(1)
        return plain(self, closure)

    prove_elementwise(optimizer, counted)
    assert len(steps) == 3 * 5


def test_half_precision_parameters_are_tried_in_full() -> None:
    model = nn.Linear(4, 4).bfloat16()
    assert prove_elementwise(optim.AdamW(model.parameters()), optim.AdamW.step)["exp_avg"]
    with pytest.raises(UsageError, match="Lamb"):
        prove_elementwise(Lamb(model.parameters()), Lamb.step)
