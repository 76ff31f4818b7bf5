"""Every optimizer, parameter groups, clipping and learning-rate schedules."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn, optim
from torch.optim import lr_scheduler

from ..models import adamw, cross_entropy, evaluation, mlp, sgd, train
from ..registry import ALL, BOTH, BOUND, DIVIDED, LARGE, UPDATED_THERE, Grid, add, scenario
from ..sides import Side

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (optim.SGD, {"lr": 0.2}),
    "sgd_momentum_decay": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.02}),
    "sgd_nesterov": (
        optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    ),
    "sgd_dampening_maximize": (
        optim.SGD,
        {"lr": 0.01, "momentum": 0.8, "dampening": 0.1, "maximize": True},
    ),
    "sgd_foreach": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    "sgd_single": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": False}),
    "sgd_fused": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "adam_amsgrad": (optim.Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.01}),
    "adamw": (optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "adamw_foreach": (optim.AdamW, {"lr": 0.01, "foreach": True}),
    "adamw_single": (optim.AdamW, {"lr": 0.01, "foreach": False}),
    "adamw_fused": (optim.AdamW, {"lr": 0.01, "fused": True}),
    "rmsprop": (optim.RMSprop, {"lr": 0.003, "momentum": 0.5, "centered": True}),
    "adagrad": (optim.Adagrad, {"lr": 0.05, "lr_decay": 0.01}),
    "adadelta": (optim.Adadelta, {"lr": 1.0}),
    "nadam": (optim.NAdam, {"lr": 0.01}),
    "radam": (optim.RAdam, {"lr": 0.01}),
}


def _with_optimizer(cls: Any, options: dict[str, Any]) -> Callable[[Side], None]:
    def play(side: Side) -> None:
        model = mlp()
        train(side, *side.setup(model, cls(model.parameters(), **options)), range(8))

    return play


for _name, (_cls, _options) in OPTIMIZERS.items():
    add(_with_optimizer(_cls, _options), f"optimizer_{_name}")


@scenario(Grid(strategies=ALL))
def an_optimizer_of_rows_and_columns(side: Side) -> None:
    model = mlp()
    train(side, *side.setup(model, optim.Adafactor(model.parameters(), lr=0.02)), range(8))


@scenario(Grid(worlds=(2,), strategies=ALL))  # more add in other orders, which bfloat16 magnifies
def an_optimizer_of_whole_matrices(side: Side) -> None:
    model = mlp()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    train(side, *side.setup(model, optim.Muon(matrices, lr=0.02)), range(8))


@scenario(Grid(worlds=(1, 2, 4)))
def initial_weights_are_rank_zeros(side: Side) -> None:
    torch.manual_seed(100 + side.rank)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
    model[1].running_mean.fill_(float(side.rank))  # type: ignore[operator]
    train(side, *side.setup(model, sgd(model)), range(3))


@scenario()
def groups_with_different_settings(side: Side) -> None:
    model = mlp()
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    groups = [
        {"params": biases, "lr": 0.3, "weight_decay": 0.0, "momentum": 0.0},
        {"params": weights[:1], "lr": 0.05, "nesterov": True},
        {"params": weights[1:][::-1], "weight_decay": 0.1},
    ]
    optimizer = optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01)
    train(side, *side.setup(model, optimizer), range(8))


@scenario()
def adamw_groups(side: Side) -> None:
    model = mlp()
    half = list(model.parameters())
    groups = [
        {"params": half[:2], "lr": 0.02, "betas": (0.8, 0.9)},
        {"params": half[2:5], "weight_decay": 0.3},
        {"params": half[5:], "lr": 0.0},
    ]
    train(side, *side.setup(model, optim.AdamW(groups, lr=0.005)), range(8))


@scenario()
def optimizer_has_part_of_the_model(side: Side) -> None:
    model = mlp()
    model, optimizer = side.setup(model, optim.Adam(list(model.parameters())[2:], lr=0.01))
    train(side, model, optimizer)


def _clipped(norm: float, limit: float) -> Callable[[Side], None]:
    def play(side: Side) -> None:
        model = mlp()
        model, optimizer = side.setup(model, sgd(model))
        for step in range(6):
            x, y = side.batch(step)
            optimizer.zero_grad()
            cross_entropy(model, x, y).backward()
            side.note("total norm", side.clip(model, optimizer, limit, norm))
            optimizer.step()

    return play


for _norm in (2.0, 1.0, float("inf"), 3.0):
    add(_clipped(_norm, 0.05), f"clip_norm_{_norm}")
add(_clipped(2.0, 1e6), "clip_that_does_nothing")


@scenario()
def clip_with_torch(side: Side) -> None:
    model = mlp()
    model, optimizer = side.setup(model, adamw(model))
    for step in range(6):
        x, y = side.batch(step)
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        total = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        side.note("total norm", total)
        optimizer.step()


@scenario()
def clip_values_through_param_groups(side: Side) -> None:
    model = mlp()
    model, optimizer = side.setup(model, sgd(model))
    for step in range(6):
        x, y = side.batch(step)
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        nn.utils.clip_grad_value_(optimizer.param_groups[0]["params"], 0.01)
        optimizer.step()


@scenario(Grid(strategies=("allreduce",)))
def clip_a_list_made_before_training(side: Side) -> None:
    model = mlp()
    kept = list(model.parameters())
    model, optimizer = side.setup(model, sgd(model))
    for step in range(4):
        x, y = side.batch(step)
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        side.note("total norm", nn.utils.clip_grad_norm_(kept, 0.05))
        optimizer.step()


class _WithSpare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(5, 5)
        self.body = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        return out


@scenario()
def clip_a_model_with_unused_parameters(side: Side) -> None:
    model: Any = _WithSpare()
    model, optimizer = side.setup(model, adamw(model))
    for step in range(4):
        x, y = side.batch(step)
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        side.note("total norm", side.clip(model, optimizer, 0.05))
        optimizer.step()


Schedule = Callable[[Any], Any]


def _warm_up(optimizer: Any) -> Any:
    return lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))


def _one_cycle(optimizer: Any) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=12)


def _step_lr(optimizer: Any) -> Any:
    return lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def _chained(optimizer: Any) -> Any:
    first = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    then = lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
    return lr_scheduler.SequentialLR(optimizer, [first, then], milestones=[3])


def _scheduled(schedule: Schedule, before: bool, make: Any) -> Callable[[Side], None]:
    def play(side: Side) -> None:
        model = mlp()
        optimizer = make(model)
        scheduler = schedule(optimizer) if before else None
        model, optimizer = side.setup(model, optimizer)
        scheduler = scheduler or schedule(optimizer)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*lr_scheduler.step.*")
            for step in range(9):
                train(side, model, optimizer, [step])
                scheduler.step()
                side.note("lr", scheduler.get_last_lr()[0])

    return play


for _schedule in (_warm_up, _one_cycle, _step_lr):
    for _before in (True, False):
        _when = "before" if _before else "after"
        _title = f"schedule{_schedule.__name__}_made_{_when}_distribute"
        add(_scheduled(_schedule, _before, sgd), _title)
add(_scheduled(_one_cycle, False, adamw), "schedule_one_cycle_of_adamw")
add(_scheduled(_step_lr, True, adamw), "schedule_step_lr_of_adamw")
add(_scheduled(_chained, False, sgd), "schedule_sequential")


@scenario()
def learning_rate_set_by_hand_right_after_step(side: Side) -> None:
    model = mlp()
    model, optimizer = side.setup(model, sgd(model))
    for step in range(6):
        train(side, model, optimizer, [step])
        for group in optimizer.param_groups:
            group["lr"] = 0.3 / (step + 1)
            group["momentum"] = 0.5 + 0.05 * step


@scenario()
def learning_rate_set_by_hand_between_backward_and_step(side: Side) -> None:
    model = mlp()
    model, optimizer = side.setup(model, adamw(model))
    for step in range(6):
        x, y = side.batch(step)
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.param_groups[0]["lr"] = 0.02 / (step + 1)
        optimizer.step()


@scenario()
def step_with_a_closure(side: Side) -> None:
    model = mlp()
    model, optimizer = side.setup(model, sgd(model))
    for step in range(4):
        closure = evaluation(model, optimizer, *side.batch(step))
        side.note("loss", optimizer.step(closure))


class Curved(optim.Optimizer):
    """As Sophia: a step with an argument of its own, and a method that reads gradients."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    def _pairs(self) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    yield group, param, self.state[param]

    @torch.no_grad()
    def update_curvature(self) -> None:
        for _, param, state in self._pairs():
            curvature = state.setdefault("curvature", torch.zeros_like(param))
            curvature.mul_(0.9).addcmul_(param.grad, param.grad, value=0.1)

    @torch.no_grad()
    def step(self, closure: Any = None, batch_size: int = 5120, floor: float = 0.1) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, param, state in self._pairs():
            curvature = state.setdefault("curvature", torch.zeros_like(param))
            param.sub_(param.grad / (batch_size * curvature + floor), alpha=group["lr"])
        return loss


WHOLE = tuple(name for name in Grid().strategies if name not in (*DIVIDED, *UPDATED_THERE))


WITH_BOUND = Grid(worlds=(2,), strategies=(*BOTH, *BOUND), mbs=(LARGE,))


class Sharpness(optim.SGD):
    """As SAM, whose two steps each follow a backward."""

    @torch.no_grad()
    def first_step(self) -> None:
        self.moved = []
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.moved.append((param, param.grad * 0.05))
                    param.add_(self.moved[-1][1])
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for param, by in self.moved:
            param.sub_(by)
        self.step()


@scenario(WITH_BOUND)
def two_steps_each_after_a_backward(side: Side) -> None:
    model = mlp()
    model, optimizer = side.setup(model, Sharpness(model.parameters(), lr=0.1, momentum=0.9))
    for step in range(5):
        optimizer.zero_grad()
        cross_entropy(model, *side.batch(step)).backward()
        optimizer.first_step()
        cross_entropy(model, *side.batch(step)).backward()
        optimizer.second_step()


class Averaged(optim.Optimizer):
    """As schedule-free SGD: counts in its options, and has weights to train and to evaluate."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "training": True})

    def _turn(self, training: bool, weight: float) -> None:
        for group in self.param_groups:
            if group["training"] != training:
                for param in group["params"]:
                    if "z" in self.state[param]:
                        param.data.lerp_(self.state[param]["z"], weight)
                group["training"] = training

    def eval(self) -> None:
        self._turn(False, 1 - 1 / 0.9)

    def train(self) -> None:
        self._turn(True, 1 - 0.9)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["training"]
            group["k"] += 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                z = self.state[param].setdefault("z", param.clone())
                param.lerp_(z, 1 / group["k"])
                param.add_(param.grad, alpha=group["lr"] * (0.9 * (1 - 1 / group["k"]) - 1))
                z.sub_(param.grad, alpha=group["lr"])


@scenario(WITH_BOUND)
def an_optimizer_that_counts_and_has_modes(side: Side) -> None:
    model = mlp()
    model, optimizer = side.setup(model, Averaged(model.parameters(), lr=0.1))
    for epoch in range(2):
        optimizer.train()
        train(side, model, optimizer, range(3 * epoch, 3 * epoch + 3))
        optimizer.eval()
        with torch.no_grad():
            side.note("validation", cross_entropy(model, *side.batch(50)))


@scenario(WITH_BOUND)
def a_learning_rate_in_a_tensor(side: Side) -> None:
    model = mlp()
    made = optim.AdamW(model.parameters(), lr=torch.tensor(0.01))  # type: ignore[arg-type]
    model, optimizer = side.setup(model, made)
    scheduler = _one_cycle(optimizer)
    for step in range(5):
        train(side, model, optimizer, [step])
        scheduler.step()


@scenario(WITH_BOUND)
def gradients_that_are_scaled_clipped_and_added_to(side: Side) -> None:
    model = mlp()
    model, optimizer = side.setup(model, sgd(model))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(5):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        with side.no_sync(model):
            scaler.scale(cross_entropy(model, *side.batch(step))).backward()
        scaler.scale(cross_entropy(model, *side.batch(step + 10))).backward()
        scaler.scale(cross_entropy(model, *side.batch(step + 20))).backward()
        scaler.unscale_(optimizer)
        side.note("total norm", side.clip(model, optimizer, 0.1))
        scaler.step(optimizer)
        scaler.update()


@scenario(Grid(strategies=(*WHOLE, *BOUND)))
def step_with_arguments(side: Side) -> None:
    model = mlp()
    model, optimizer = side.setup(model, Curved(model.parameters()))
    for step in range(6):
        optimizer.zero_grad()
        cross_entropy(model, *side.batch(step)).backward()
        optimizer.update_curvature()
        optimizer.zero_grad()
        closure = evaluation(model, optimizer, *side.batch(step + 100))
        if step == 3:
            side.note("loss", optimizer.step(closure, 8, floor=0.2))
            continue
        if step == 4:
            side.note("loss", optimizer.step(batch_size=16, closure=closure))
            continue
        closure()
        if step % 2:
            optimizer.step(None, 64)
        else:
            optimizer.step(batch_size=32)


@scenario(Grid(strategies=WHOLE))
def step_that_must_have_an_argument(side: Side) -> None:
    class Scaled(optim.SGD):
        def step(self, scale: float, closure: Any = None) -> Any:  # type: ignore[override]
            for group in self.param_groups:
                for param in group["params"]:
                    param.grad.mul_(scale)
            return super().step(closure)

    model = mlp()
    model, optimizer = side.setup(model, Scaled(model.parameters(), lr=0.1))
    for step in range(4):
        optimizer.zero_grad()
        cross_entropy(model, *side.batch(step)).backward()
        optimizer.step(0.5 + step)


@scenario()
def step_hooks_of_the_user(side: Side) -> None:
    model = mlp()
    calls = {"pre": 0, "post": 0}
    optimizer = sgd(model)
    optimizer.register_step_pre_hook(lambda *_: calls.update(pre=calls["pre"] + 1))
    optimizer.register_step_post_hook(lambda *_: calls.update(post=calls["post"] + 1))
    train(side, *side.setup(model, optimizer), range(4))
    side.note("calls of the pre hook", calls["pre"])
    side.note("calls of the post hook", calls["post"])
