"""What the hooks see of training loops, on a clock that modules advance."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as torch_hooks
from torch.utils.checkpoint import checkpoint

from wingbeat.errors import UsageError
from wingbeat.profiling import layers, recorder
from wingbeat.profiling.profile import ProfiledLayer
from wingbeat.profiling.recorder import Recorder, Stop

COUNT = 2


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(recorder, "time", made)
    return made


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, clock: Clock, ms: tuple[int, int]) -> Tensor:
        ctx.clock, ctx.ms = clock, ms
        ctx.save_for_backward(x)
        clock.now += ms[0] / 1e3
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.saved_tensors  # a checkpoint computes them again
        ctx.clock.now += ctx.ms[1] / 1e3
        return grads[0], grads[0].sum().reshape(1), None, None


class Work(nn.Module):
    """Takes ``ms`` of the clock in forward and in backward."""

    def __init__(self, clock: Clock, forward_ms: int, backward_ms: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.clock, self.ms = clock, (forward_ms, backward_ms)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Work.apply(x, self.weight, self.clock, self.ms)
        return out


def recorded(train: Callable[[], object]) -> SimpleNamespace:
    """The layers of a loop, its typical iteration, and the iterations without hooks."""
    made = Recorder(COUNT, lambda _: None)
    with made, pytest.raises(Stop) as stopped:
        train()
    assert not torch_hooks._global_forward_hooks
    assert not torch_hooks._global_forward_pre_hooks
    if stopped.value.error is not None:
        raise stopped.value.error
    hooked, plain = made.finish()
    assert len(hooked) == len(plain) == COUNT
    typical = layers.typical(hooked)
    return SimpleNamespace(
        layers=layers.layers_of(typical, made.description), typical=typical, plain=plain
    )


def loop(
    model: nn.Module,
    batch: Callable[[], Any] = lambda: torch.ones(4, 8),
    loss: Callable[[Any], Tensor] = lambda out: out.sum(),
    *,
    passes: int = 1,
    clock: Clock | None = None,
) -> SimpleNamespace:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.01)

    def train() -> None:
        for _ in range(100):
            optimizer.zero_grad()
            for _ in range(passes):
                loss(model(batch())).backward()
            if clock is not None:
                clock.now += 0.5
            optimizer.step()

    return recorded(train)


def sizes(found: tuple[ProfiledLayer, ...]) -> dict[str, dict[str, tuple[int, ...]]]:
    named = (x for x in found if not x.name.startswith("("))
    return {x.name: {p.name: p.shape for p in x.parameters} for x in named}


def times(found: tuple[ProfiledLayer, ...]) -> dict[str, tuple[int, int]]:
    return {x.name: (round(x.forward_ms), round(x.backward_ms)) for x in found}


def test_layers_have_the_times_that_they_take(clock: Clock) -> None:
    model = nn.Sequential(Work(clock, 2, 3), nn.ReLU(inplace=True), Work(clock, 5, 7))
    found = loop(model, clock=clock)
    assert times(found.layers) == {
        "(optimizer)": (500, 0),
        "0": (2, 3),
        "1": (0, 0),
        "2": (5, 7),
    }
    assert found.typical.total_ms == pytest.approx(517)
    assert found.plain == [pytest.approx(517)] * COUNT
    assert found.typical.batch == 4


def test_module_that_returns_its_input_takes_no_time_of_others(clock: Clock) -> None:
    found = loop(nn.Sequential(Work(clock, 2, 3), nn.Identity())).layers
    assert times(found) == {"0": (2, 3), "1": (0, 0)}


def test_functional_code_belongs_to_the_next_module(clock: Clock) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Work(clock, 1, 2), Work(clock, 4, 8)
            self.clock = clock

        def forward(self, x: Tensor) -> Tensor:
            between = _Work.apply(self.a(x), torch.ones(1), clock, (16, 32))
            return self.b(between) + 1  # type: ignore[no-any-return]

    assert times(loop(Net()).layers) == {"a": (1, 2), "b": (20, 40)}


def test_accumulated_batches_count_together(clock: Clock) -> None:
    model = nn.Sequential(Work(clock, 2, 3), Work(clock, 5, 7))
    found = loop(model, passes=3)
    assert found.typical.batch == 12
    assert times(found.layers) == {"0": (2, 3), "1": (5, 7), "(loss)": (10 + 17 + 7, 0)}


def test_checkpointed_module_is_computed_again_in_backward(clock: Clock) -> None:
    class Net(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.a, self.b = Work(clock, 2, 3), Work(clock, 5, 7)
            self.reentrant = reentrant

        def forward(self, x: Tensor) -> Tensor:
            kept = checkpoint(self.a, x.requires_grad_(), use_reentrant=self.reentrant)
            return self.b(kept)  # type: ignore[no-any-return]

    assert times(loop(Net(False)).layers) == {"a": (2, 3 + 2), "b": (5, 7)}
    with pytest.raises(UsageError, match="use_reentrant=False"):
        loop(Net(True))


def test_module_called_twice_is_two_layers_with_its_parameters_in_the_first(clock: Clock) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = Work(clock, 2, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(self.a(x))  # type: ignore[no-any-return]

    found = loop(Net()).layers
    assert sizes(found) == {"a": {"weight": (1,)}, "a#2": {}}
    assert times(found) == {"a": (2, 3), "a#2": (2, 3)}


def test_shared_parameter_counts_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 20, bias=False)
            self.words = nn.Embedding(20, 8)
            self.head.weight = self.words.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.words(x))  # type: ignore[no-any-return]

    found = loop(Tied(), lambda: torch.zeros(4, 5, dtype=torch.long)).layers
    assert sizes(found) == {"words": {"weight": (20, 8)}, "head": {}}


def test_parameters_used_directly_stand_in_the_order_of_their_use() -> None:
    class Vision(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.token = nn.Parameter(torch.zeros(1, 1, 8))
            self.place = nn.Parameter(torch.zeros(1, 4, 8))
            self.patch, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.cat([self.token.expand(len(x), -1, -1), self.patch(x)], 1)
            return self.norm(y + self.place) * self.scale  # type: ignore[no-any-return]

    found = sizes(loop(Vision(), lambda: torch.ones(4, 3, 8)).layers)
    assert list(found) == ["Vision", "patch", "Vision#2", "norm", "Vision#3"]
    assert found["Vision"] == {"token": (1, 1, 8)}
    assert found["Vision#2"] == {"place": (1, 4, 8)}
    assert found["Vision#3"] == {"scale": ()}


def test_attention_has_the_parameters_of_its_unused_child() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    found = sizes(loop(model, lambda: torch.ones(4, 3, 8)).layers)
    assert found["self_attn"] == {"in_proj_weight": (24, 8), "in_proj_bias": (24,)}
    assert found["self_attn.out_proj"] == {"weight": (8, 8), "bias": (8,)}
    assert sum(len(x) for x in found.values()) == len(list(model.parameters()))


def test_frozen_and_unused_parameters_are_told_apart() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    model[0].requires_grad_(False)
    model[1].register_parameter("unused", nn.Parameter(torch.zeros(3)))
    found = loop(model).layers
    assert sizes(found) == {
        "1": {"unused": (3,)},
        "0": {},
        "1#2": {"weight": (2, 8), "bias": (2,)},
    }
    assert next(x for x in found if x.name == "0").backward_ms == 0


def test_model_called_by_keywords_that_returns_a_dict_is_found() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 2)

        def forward(self, *, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"loss": self.a(inputs["x"]).sum()}

    model = Net()
    optimizer = torch.optim.SGD(model.parameters())

    def train() -> None:
        for _ in range(100):
            model(inputs={"x": torch.ones(6, 8)})["loss"].backward()
            optimizer.step()

    found = recorded(train)
    assert sizes(found.layers) == {"a": {"weight": (2, 8), "bias": (2,)}}
    assert found.typical.batch == 6


def test_evaluation_without_gradients_is_no_forward() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters())

    def train() -> None:
        for _ in range(100):
            with torch.no_grad():
                model(torch.ones(64, 8))
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()

    found = recorded(train)
    assert list(sizes(found.layers)) == ["0", "1"]
    assert found.typical.batch == 4


def test_two_optimizers_after_one_backward_are_one_step() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    first = torch.optim.Adam(model[0].parameters())
    second = torch.optim.SGD(model[1].parameters())

    def train() -> None:
        for _ in range(100):
            model(torch.ones(4, 8)).sum().backward()
            first.step()
            second.step()

    assert list(sizes(recorded(train).layers)) == ["0", "1"]


def test_two_models_have_names_of_their_own() -> None:
    models = [nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 2))]
    optimizer = torch.optim.SGD([p for m in models for p in m.parameters()])

    def train() -> None:
        for _ in range(100):
            models[1](models[0](torch.ones(4, 8))).sum().backward()
            optimizer.step()

    found = recorded(train)
    assert list(sizes(found.layers)) == ["Sequential1.0", "Sequential2.0"]


class Compiled(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        if how == "child":
            self.a = torch.compile(self.a, backend="eager")  # type: ignore[assignment]
        elif how == "in place":
            self.a.compile(backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)


@pytest.mark.parametrize("how", ["child", "in place", "whole"])
@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_compiled_module_is_refused(how: str) -> None:
    model: Any = Compiled(how)
    if how == "whole":
        model = torch.compile(model, backend="eager")
    with pytest.raises(UsageError, match="TORCH_COMPILE_DISABLE=1"):
        loop(model)


def test_closure_of_an_optimizer_is_refused() -> None:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure() -> float:
        loss = model(torch.ones(4, 8)).pow(2).sum()
        loss.backward()
        return float(loss)

    with pytest.raises(UsageError, match=r"inside optimizer\.step"):
        recorded(lambda: optimizer.step(closure))


def test_step_inside_backward_is_refused() -> None:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters())
    model.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(UsageError, match="steps inside backward"):
        recorded(lambda: model(torch.ones(4, 8)).sum().backward())


def test_optimizers_that_step_in_turns_are_refused() -> None:
    models = nn.Linear(8, 8), nn.Linear(8, 1)
    optimizers = [torch.optim.SGD(m.parameters()) for m in models]

    def train() -> None:
        for i in range(100):
            models[1](models[0](torch.ones(4, 8))).sum().backward()
            optimizers[i % 2].step()

    with pytest.raises(UsageError, match="step in turns"):
        recorded(train)


def test_parameters_of_another_dtype_are_refused() -> None:
    with pytest.raises(UsageError, match=r"parameter Linear\.weight is torch\.bfloat16"):
        loop(nn.Linear(8, 8).bfloat16(), lambda: torch.ones(4, 8, dtype=torch.bfloat16))


def test_parameters_outside_of_modules_are_refused() -> None:
    weight = nn.Parameter(torch.ones(8, 8))
    model = nn.Linear(8, 8)

    def train(*, alone: bool) -> None:
        optimizer = torch.optim.SGD([weight] if alone else [weight, *model.parameters()])
        for _ in range(100):
            out = functional.linear(torch.ones(4, 8), weight)
            (out if alone else model(out)).sum().backward()
            optimizer.step()

    with pytest.raises(UsageError, match=r"call the model as model\(batch\)"):
        recorded(lambda: train(alone=True))
    with pytest.raises(UsageError, match=r"1 of the optimizer's parameters, .* \(8, 8\)"):
        recorded(lambda: train(alone=False))
