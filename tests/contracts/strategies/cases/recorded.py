"""One rank alone traces, exports, copies or evaluates the model amid training, which goes on."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from wingbeat.engine.upgrade import engine_of

from ..models import sgd, train
from ..registry import ALL, SERVED, Grid, Rig, add, check
from ..sides import Side, WingbeatSide

Tool = Callable[[Any, Tensor], Any]

SYNCHRONOUS = Grid(worlds=(2,), strategies=(*ALL, *SERVED), mbs=(0.0004,))


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)
        self.norm = nn.LayerNorm(12)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.linear(x)))


def _net() -> Any:
    return nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), _Block(), _Block(), nn.Linear(12, 3))


def _trace(model: Any, x: Tensor) -> Any:
    return torch.jit.trace(model, x)(x)  # type: ignore[no-untyped-call]


def _trace_a_part(model: Any, x: Tensor) -> Any:
    h = torch.ones(5, 12)
    return torch.jit.trace(model[2], h)(h)  # type: ignore[no-untyped-call]


def _script(model: Any, x: Tensor) -> Any:
    return torch.jit.script(model)(x)


def _freeze(model: Any, x: Tensor) -> Any:
    return torch.jit.freeze(torch.jit.script(model))(x)


def _export(model: Any, x: Tensor) -> Any:
    return torch.export.export(model, (x,)).module()(x)


def _symbolic_trace(model: Any, x: Tensor) -> Any:
    return torch.fx.symbolic_trace(model)(x)


def _make_fx(model: Any, x: Tensor) -> Any:
    return make_fx(lambda given: model(given))(x)(x)


def _count_flops(model: Any, x: Tensor) -> Any:
    counter = FlopCounterMode(display=False)
    with counter:
        model(x)
    return torch.tensor(counter.get_total_flops())


def _evaluate(model: Any, x: Tensor) -> Any:
    return model(x)


def _summarise(model: Any, x: Tensor) -> Any:
    seen: list[int] = []
    hook = lambda _module, _given, out: seen.append(out.numel())  # noqa: E731
    handles = [module.register_forward_hook(hook) for module in model.modules()]
    model(x)
    for handle in handles:
        handle.remove()
    return torch.tensor(seen)


def _copy(model: Any, x: Tensor) -> Any:
    return copy.deepcopy(model)(x)


def _save(model: Any, x: Tensor) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)(x)


def _vmap(model: Any, x: Tensor) -> Any:
    return torch.func.vmap(lambda row: model(row[None])[0])(x)


TOOLS: tuple[Tool, ...] = (
    _trace,
    _trace_a_part,
    _script,
    _freeze,
    _export,
    _symbolic_trace,
    _make_fx,
    _count_flops,
    _evaluate,
    _summarise,
    _copy,
    _save,
    _vmap,
)


def _alone(gradients: bool) -> Callable[[Side], None]:
    """Rank 0 uses a tool after every step; what comes out must be as it is of a plain model."""

    def play(side: Side) -> None:
        torch.manual_seed(3)
        model = _net()
        bare = model
        x = torch.linspace(-1, 1, 40).view(5, 8)
        model, optimizer = side.setup(model, sgd(model))
        for step, tool in enumerate(TOOLS):
            train(side, model, optimizer, range(step, step + 1))
            if side.rank == 0:
                bare.eval()
                with torch.set_grad_enabled(gradients):
                    side.note(tool.__name__, tool(bare, x))
                bare.train()

    return play


add(_alone(gradients=True), "one_rank_alone_records_the_model", SYNCHRONOUS)
add(_alone(gradients=False), "one_rank_alone_records_it_without_gradients", SYNCHRONOUS)


def _trace_while_training(side: Side) -> None:
    """In train mode: batch norm's statistics follow the one that is traced, as on a plain model."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 12), _Block(), nn.Linear(12, 3))
    bare = model
    model, optimizer = side.setup(model, sgd(model))
    for step in range(4):
        train(side, model, optimizer, range(step, step + 1))
        if side.rank == side.size - 1:
            x = torch.linspace(-1, 1, 40).view(5, 8)
            side.note("traced", torch.jit.trace(bare, x)(x))  # type: ignore[no-untyped-call]
            side.note("made", make_fx(lambda given: bare(given))(x)(x))


add(_trace_while_training, "the_last_rank_alone_traces_in_train_mode", SYNCHRONOUS)


def _part_or_copy(side: Side) -> None:
    """`torch.jit.script` compiles hooks, and wingbeat's are no TorchScript.

    Parts without buffers have hooks only where updates are deferred.
    """
    import pytest

    model: Any = nn.Sequential(nn.Linear(8, 12), _Block(), nn.Linear(12, 3))
    bare = model
    model, optimizer = side.setup(model, sgd(model))
    train(side, model, optimizer, range(2))
    if isinstance(side, WingbeatSide):
        engine = engine_of(model)
        assert engine is not None
        for part in (copy.deepcopy(bare), *([bare[1]] if engine.update.defers else [])):
            with pytest.raises(AttributeError, match="script the model itself"):
                torch.jit.script(part)
    train(side, model, optimizer, range(2, 4))


add(_part_or_copy, "a_part_or_a_copy_is_scripted", Grid((2,), ("allreduce", "dear"), (0.0004,)))


@check(Grid((2,), ("allreduce", "dear"), (0.0004,)))
def what_is_recorded_has_nothing_of_ours(rig: Rig) -> None:
    """Buffers that came behind the gradients are taken over before it begins, not as part of it."""
    side = WingbeatSide(rig.rank, rig.size, strategy=rig.strategy)
    model: Any = _net()
    model, optimizer = side.setup(model, sgd(model))
    x = torch.linspace(-1, 1, 40).view(5, 8)

    def traced() -> str:
        return str(torch.jit.trace(model, x).inlined_graph)  # type: ignore[no-untyped-call]

    def made() -> str:
        return str(make_fx(lambda given: model(given))(x).code)

    for step, record in enumerate((traced, made, traced, made)):
        train(side, model, optimizer, range(step, step + 1))
        if rig.rank == rig.size - 1:  # whose buffers are rank 0's
            model.eval()
            assert "copy_" not in record()
            model.train()
    side.leave()
