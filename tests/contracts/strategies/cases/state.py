"""State dicts, evaluation, copies and reads at any moment; exceptions in the middle of a step."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ..compare import assert_same_on_every_rank, difference
from ..models import adamw, cross_entropy, mlp, note_parameters, sgd, train
from ..registry import Grid, Rig, add, check, scenario
from ..sides import Side, WingbeatSide


def _read_after_step(read: Callable[[Side, Any, int], None], make: Any) -> Callable[[Side], None]:
    def play(side: Side) -> None:
        model = mlp()
        model, optimizer = side.setup(model, make(model))
        for step in range(5):
            train(side, model, optimizer, [step])
            read(side, model, step)

    return play


def _parameters(side: Side, model: Any, step: int) -> None:
    for p in side.bare(model).parameters():
        side.note(f"parameter after {step}", p)


def _named(side: Side, model: Any, step: int) -> None:
    note_parameters(side, model, f"after {step}")


def _state_dict(side: Side, model: Any, step: int) -> None:
    for name, value in side.bare(model).state_dict().items():
        side.note(f"{name} after {step}", value)


def _deep_copy(side: Side, model: Any, step: int) -> None:
    twin = copy.deepcopy(side.bare(model))
    with torch.no_grad():
        side.note(f"output of the copy after {step}", twin(side.batch(50)[0]))


def _pickle(side: Side, model: Any, step: int) -> None:
    file = io.BytesIO()
    torch.save(side.bare(model).state_dict(), file)
    file.seek(0)
    x, _ = side.batch(50)
    plain = mlp().to(x.device)
    plain.load_state_dict(torch.load(file))
    side.note(f"output of the saved one after {step}", plain(x))


def _evaluate(side: Side, model: Any, step: int) -> None:
    model.eval()
    with torch.no_grad():
        side.note(f"output in no_grad after {step}", model(side.batch(50)[0]))
    model.train()


def _evaluate_in_train_mode(side: Side, model: Any, step: int) -> None:
    with torch.no_grad():
        side.note(f"output in train mode after {step}", model(side.batch(50)[0]))


def _evaluate_in_inference_mode(side: Side, model: Any, step: int) -> None:
    model.eval()
    with torch.inference_mode():
        side.note(f"output in inference mode after {step}", model(side.batch(50)[0]))
    model.train()


def _evaluate_with_grad_mode(side: Side, model: Any, step: int) -> None:
    side.bare(model).eval()
    side.note(f"output in eval after {step}", side.bare(model)(side.batch(50)[0]))
    side.bare(model).train()


for _read in (
    _parameters,
    _named,
    _state_dict,
    _deep_copy,
    _pickle,
    _evaluate,
    _evaluate_in_train_mode,
    _evaluate_in_inference_mode,
    _evaluate_with_grad_mode,
):
    add(_read_after_step(_read, sgd), f"right_after_step{_read.__name__}")
add(_read_after_step(_evaluate, adamw), "right_after_step_evaluate_adamw")
add(_read_after_step(_state_dict, adamw), "right_after_step_state_dict_adamw")


@scenario()
def averaged_model(side: Side) -> None:
    model = mlp()
    bare = model
    model, optimizer = side.setup(model, sgd(model))
    average: Any = AveragedModel(bare, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    for step in range(6):
        train(side, model, optimizer, [step])
        average.update_parameters(bare)
    for name, value in average.module.named_parameters():
        side.note(f"average {name}", value)


@scenario()
def weights_changed_by_hand_after_step(side: Side) -> None:
    """As weight clipping does: every parameter is clamped after every step."""
    model = mlp()
    bare = model
    model, optimizer = side.setup(model, sgd(model))
    for step in range(6):
        train(side, model, optimizer, [step])
        with torch.no_grad():
            for p in bare.parameters():
                p.clamp_(-0.2, 0.2)


@scenario()
def optimizer_state_read_after_every_step(side: Side) -> None:
    model = mlp()
    model, optimizer = side.setup(model, adamw(model))
    for step in range(4):
        train(side, model, optimizer, [step])
        for index, entries in sorted(optimizer.state_dict()["state"].items()):
            for key in ("exp_avg", "exp_avg_sq"):
                side.note(f"{key} of {index} after {step}", entries[key])


def _saved(model: Any, optimizer: Any) -> tuple[Any, Any]:
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    model_state, optimizer_state = torch.load(file)
    return model_state, optimizer_state


def _resumed(make: Any, when: str) -> Callable[[Side], None]:
    """Save after some steps, load into another pair, go on there."""

    def play(side: Side) -> None:
        model: Any = mlp()
        bare = model
        model, optimizer = side.setup(model, make(model))
        train(side, model, optimizer, range(4))
        saved = _saved(bare, optimizer)
        side.trained.pop()
        _leave(side, model, optimizer)
        torch.manual_seed(99)
        model = bare = mlp()
        optimizer = make(model, lr=0.5)
        if when == "before_distribute":
            bare.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        model, optimizer = side.setup(model, optimizer)
        if when == "after_steps":
            train(side, model, optimizer, range(20, 22))
        if when != "before_distribute":
            bare.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        train(side, model, optimizer, range(4, 8))

    return play


def _leave(side: Side, model: Any, optimizer: Any) -> None:
    if isinstance(side, WingbeatSide):
        import wingbeat

        wingbeat.release(model, optimizer)


for _make in (sgd, adamw):
    for _when in ("before_distribute", "after_distribute", "after_steps"):
        add(_resumed(_make, _when), f"resume_{_make.__name__}_loaded_{_when}")


@scenario()
def optimizer_loaded_between_backward_and_step(side: Side) -> None:
    model = mlp()
    model, optimizer = side.setup(model, adamw(model))
    train(side, model, optimizer, range(3))
    _, kept = _saved(side.bare(model), optimizer)
    train(side, model, optimizer, range(3, 5))
    optimizer.zero_grad()
    cross_entropy(model, *side.batch(5)).backward()
    optimizer.load_state_dict(kept)
    optimizer.step()
    train(side, model, optimizer, range(6, 8))


@scenario()
def state_read_between_backward_and_step(side: Side) -> None:
    model = mlp()
    model, optimizer = side.setup(model, adamw(model))
    for step in range(4):
        optimizer.zero_grad()
        cross_entropy(model, *side.batch(step)).backward()
        model_state, optimizer_state = _saved(side.bare(model), optimizer)
        side.note("a weight before step", model_state["0.weight"])
        side.note("entries of the optimizer's state", float(len(optimizer_state["state"])))
        optimizer.step()


@check()
def state_dicts_load_into_plain_objects(rig: Rig) -> None:
    side = WingbeatSide(rig.rank, rig.size, strategy=rig.strategy)
    model: Any = mlp()
    keys = list(model.state_dict())
    model, optimizer = side.setup(model, adamw(model))
    train(side, model, optimizer, range(3))
    assert list(model.state_dict()) == keys
    assert [n for n, _ in model.named_modules()] == [n for n, _ in mlp().named_modules()]
    plain: Any = mlp()
    plain_optimizer = adamw(plain)
    model_state, optimizer_state = _saved(model, optimizer)
    plain.load_state_dict(model_state, strict=True)
    plain_optimizer.load_state_dict(optimizer_state)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    x, y = torch.ones(4, 8), torch.tensor([0, 1, 2, 0])
    for m, o in ((plain, plain_optimizer), (model, optimizer)):
        o.zero_grad()
        cross_entropy(m, x, y).backward()
        o.step()
    for (name, value), mine in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert difference(mine, value, 1e-6) < 1e-5, name
    side.leave()


@check()
def buffers_are_rank_zeros_after_every_step(rig: Rig) -> None:
    side = WingbeatSide(rig.rank, rig.size, strategy=rig.strategy)
    model: Any = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
    model, optimizer = side.setup(model, sgd(model))
    seen: list[Tensor] = []
    for step in range(4):
        train(side, model, optimizer, [step])
        buffers = {k: v for k, v in model.state_dict().items() if "running" in k or "num" in k}
        assert_same_on_every_rank(buffers, f"buffers after step {step}")
        assert int(buffers["1.num_batches_tracked"]) == step + 1
        seen.append(buffers["1.running_mean"].clone())
    assert not torch.equal(seen[0], seen[-1]), "the running mean never moved"
    side.leave()


@check()
def flush_applies_what_is_pending(rig: Rig) -> None:
    side = WingbeatSide(rig.rank, rig.size, strategy=rig.strategy)
    model: Any = mlp()
    weight = model[0].weight
    model, optimizer = side.setup(model, sgd(model))
    train(side, model, optimizer, range(2))
    model.synchronize()
    after_flush = weight.detach().clone()
    assert torch.equal(after_flush, model.state_dict()["0.weight"])
    model.synchronize()
    assert torch.equal(after_flush, weight), "a second flush changed the weights"
    assert_same_on_every_rank({"0.weight": weight}, "after flush")
    side.leave()


class Trap(torch.autograd.Function):
    """Identity whose backward raises when armed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, armed: bool) -> Tensor:
        ctx.armed = armed
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.armed:
            raise RuntimeError("the trap in backward")
        return grad, None


class Trapped(nn.Module):
    """Fails in the middle of forward or of backward when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 3)
        self.armed = ""

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if index == 1:
                if self.armed == "forward":
                    raise RuntimeError("the trap in forward")
                x = Trap.apply(x, self.armed == "backward")
        out: Tensor = self.head(x)
        return out


def _interrupted(where: str) -> Callable[[Side], None]:
    """DDP refuses to go on after a failed backward, so the reference leaves that batch out."""

    def play(side: Side) -> None:
        model: Any = Trapped()
        bare = model
        model, optimizer = side.setup(model, adamw(model))
        for step in range(7):
            if side.is_subject and step in (1, 4):
                _fail_on_purpose(side, bare, model, optimizer, where)
            train(side, model, optimizer, [step])

    return play


def _fail_on_purpose(side: Side, bare: Any, model: Any, optimizer: Any, where: str) -> None:
    bare.armed = where
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="the trap"):
        cross_entropy(model, *side.batch(60)).backward()
    bare.armed = ""


add(_interrupted("forward"), "after_an_exception_in_forward")
add(_interrupted("backward"), "after_an_exception_in_backward")


@scenario(Grid(worlds=(2,)))
def exception_in_the_very_first_backward(side: Side) -> None:
    model: Any = Trapped()
    bare = model
    model, optimizer = side.setup(model, sgd(model))
    if side.is_subject:
        _fail_on_purpose(side, bare, model, optimizer, "backward")
    train(side, model, optimizer, range(4))


@scenario()
def forward_straight_after_an_exception_in_backward(side: Side) -> None:
    """Here gradients are zeroed between forward and backward, so forward comes first."""
    model: Any = Trapped()
    bare = model
    model, optimizer = side.setup(model, sgd(model))
    for step in range(6):
        if side.is_subject and step in (0, 2, 3):
            _fail_on_purpose(side, bare, model, optimizer, "backward")
        loss = cross_entropy(model, *side.batch(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        side.note("loss", loss)
