"""Gradients in p.grad, and the placeholders for gradients that are not whole."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wingbeat
from helpers.training import (
    TINY_MB,
    Net,
    assert_same,
    backward,
    batch,
    engine,
    net,
    on,
    sgd,
    weights,
)
from wingbeat.engine.gradients.bucket import Bucket, Slot
from wingbeat.engine.gradients.views import (
    MixedGradients,
    PendingGradient,
    reads_values,
    tensors_in,
)
from wingbeat.errors import UsageError
from wingbeat.schedules.dear import Phase


def _distributed(world: Any, mb: float = TINY_MB) -> tuple[Any, Any]:
    model = net()
    strategy = wingbeat.DeAR(plan="fixed", mb=mb)
    return wingbeat.distribute(model, sgd(model.parameters()), strategy, world=world)


def _head(model: Net) -> Tensor:
    """Without the model's own methods, which would make gradients whole."""
    found = model.head._parameters["weight"]
    assert found is not None
    assert found.grad is not None
    return found.grad


def _mean() -> Tensor:
    """The gradient that all workers are to see."""
    parts = []
    for rank in range(2):
        model = net()
        backward(model, rank, 0)
        assert model.head.weight.grad is not None
        parts.append(model.head.weight.grad)
    return torch.stack(parts).mean(0)


def _saved(grad: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save({"grad": grad}, file)
    file.seek(0)
    found: Tensor = torch.load(file, weights_only=False)["grad"]
    return found


@pytest.mark.parametrize(
    "read",
    [
        lambda g: g.clone(),
        lambda g: g + 0,
        lambda g: torch.stack([torch.zeros(3, 7), g])[1],
        lambda g: torch.stack(tensors=(g, g))[0],
        lambda g: torch._foreach_mul([g], 1.0)[0],
        lambda g: torch.tensor(g.tolist()),
        lambda g: torch.from_numpy(g.numpy().copy()),
        lambda g: g.data,
        copy.deepcopy,
        _saved,
    ],
)
def test_an_operation_on_a_placeholder_gets_the_whole_gradient(
    read: Callable[[Any], Tensor],
) -> None:
    def body(world: Any) -> Tensor:
        model, _ = _distributed(world)
        backward(model, world.rank, 0)
        grad = _head(model)
        assert isinstance(grad, PendingGradient)
        assert engine(model).phase is Phase.REDUCED
        if world.rank == 0:  # whenever the other does
            got = read(grad)
            assert engine(model).phase is Phase.WHOLE
            return got.detach().clone()
        return _head(model).clone()

    wanted = _mean()
    for got in on(2, body):
        assert type(got) is Tensor
        torch.testing.assert_close(got, wanted)


def test_metadata_of_a_placeholder_gathers_nothing() -> None:
    def body(world: Any) -> None:
        model, _ = _distributed(world)
        backward(model, world.rank, 0)
        grad = _head(model)
        assert grad.shape == (3, 7)
        assert grad.dtype is torch.float32
        assert grad.stride() == (7, 1)
        assert grad.is_contiguous()
        assert engine(model).phase is Phase.REDUCED

    on(2, body)


def test_writing_to_a_placeholder_changes_the_step() -> None:
    def body(world: Any) -> Any:
        model, optimizer = _distributed(world)
        before = weights(model)
        backward(model, world.rank, 0)
        for module in (model.first, model.second, model.spare, model.head, model):
            for param in module._parameters.values():
                if param.grad is not None:
                    param.grad.zero_()
        optimizer.param_groups[0]["weight_decay"] = 0.0
        optimizer.step()
        return before, weights(model)

    for before, after in on(2, body):
        assert_same(after, before)


def test_a_placeholder_from_before_rebucketing_keeps_its_gradient() -> None:
    """A list of gradients made before a plan changed does not show those of a later backward."""

    def body(world: Any) -> None:
        model, optimizer = _distributed(world)
        backward(model, world.rank, 0)
        kept = _head(model)
        first = kept.clone()
        optimizer.step()
        optimizer.zero_grad()
        for step in (1, 2, 3):  # the second backward takes over the order of the first
            backward(model, world.rank, step)
            optimizer.step()
        assert engine(model).slots[0].pending is not kept
        slot = next(s for s in engine(model).slots if s.name == "head.weight")
        assert slot.pending is not kept
        assert torch.equal(kept.clone(), first)

    on(2, body)


def test_a_placeholder_read_after_the_step_waits_for_its_collective() -> None:
    """Whoever reads it may write to it as well; the update did not wait for the last send."""

    def body(world: Any) -> None:
        model, optimizer = _distributed(world)
        slot = next(s for s in engine(model).slots if s.name == "head.weight")
        for step in range(4):  # in the first ones it is learnt that the update may be early
            optimizer.zero_grad()
            backward(model, world.rank, step)
            kept = _head(model)
            optimizer.step()
        optimizer.zero_grad()
        assert slot.bucket.handle is not None
        kept.clone()
        assert slot.bucket.handle is None

    on(2, body)


def test_a_placeholder_without_its_engine_is_the_buffers_view() -> None:
    def body(world: Any) -> None:
        model, optimizer = _distributed(world)
        backward(model, world.rank, 0)
        kept = _head(model)
        whole = kept.clone()
        wingbeat.release(model, optimizer)
        del optimizer
        assert torch.equal(kept.clone(), whole)

    on(2, body)


def test_an_accumulated_placeholder_becomes_none_if_no_worker_has_a_gradient() -> None:
    """It stays where autograd finds it, but only while autograd is adding to it."""

    def body(world: Any) -> None:
        model, optimizer = _distributed(world)
        backward(model, world.rank, 0)
        backward(model, world.rank, 1)  # begins with the head, and adds to what stands there
        optimizer.zero_grad()
        model.first(batch(2, world.rank)).sum().backward()
        found = {name: p.grad for name, p in model.named_parameters()}
        assert {name for name, grad in found.items() if grad is not None} == {
            "first.weight",
            "first.bias",
        }

    on(2, body)


def test_the_first_gradient_of_an_unused_parameter_is_shown() -> None:
    """Added to what stands for one, before anybody has asked whether there was any."""

    def body(world: Any) -> Any:
        model, optimizer = _distributed(world)
        model.second(torch.tanh(model.first(batch(0, world.rank)))).sum().backward()
        hidden = torch.tanh(model.second(torch.tanh(model.first(batch(1, world.rank)))))
        model.head(hidden).square().mean().backward()  # the head's own gradients come first
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        return grads

    model = net()
    for rank in range(2):
        model.second(torch.tanh(model.first(batch(0, rank)))).sum().backward()
        hidden = torch.tanh(model.second(torch.tanh(model.first(batch(1, rank)))))
        model.head(hidden).square().mean().backward()
    wanted = {name: p.grad / 2 for name, p in model.named_parameters() if p.grad is not None}
    for found in on(2, body):
        assert_same(found, wanted, 1e-5)


@pytest.mark.parametrize("stepped", [False, True])
def test_listed_parameters_have_plain_gradients(stepped: bool) -> None:
    """Not what stands for them: it has no memory, which code in C++ may ask for."""

    def body(world: Any) -> None:
        model, optimizer = _distributed(world)
        backward(model, world.rank, 0)
        if stepped:
            optimizer.step()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        assert len(grads) == 7
        assert {type(grad) for grad in grads} == {Tensor}

    on(2, body)


def test_a_gradient_cut_short_is_refused() -> None:
    def fail(_grad: Tensor) -> None:
        raise ArithmeticError

    def body(world: Any) -> None:
        model, _ = _distributed(world)
        hidden = torch.tanh(model.first(torch.ones(2, 6)))
        hidden.register_hook(fail)
        out = model.head(torch.tanh(model.second(hidden)) * model.scale)
        with pytest.raises(ArithmeticError):
            out.sum().backward()
        with pytest.raises(UsageError, match=r"'head\.weight' is gone: an exception cut"):
            _head(model).sum()
        # It has gone from the parameter too, and training goes on.
        assert model.head.weight.grad is None
        backward(model, world.rank, 0)
        torch.testing.assert_close(_head(model).clone(), _mean())

    on(2, body)


def test_a_gradient_read_in_its_own_backward_is_refused() -> None:
    def body(world: Any) -> None:
        model, _ = _distributed(world)
        seen: list[str] = []

        def look(_grad: Tensor) -> None:
            try:
                _head(model).sum()
            except UsageError as err:
                seen.append(str(err))

        hidden = torch.tanh(model.first(torch.ones(2, 6)))
        hidden.register_hook(look)
        out: Tensor = model.head(torch.tanh(model.second(hidden)) * model.scale)
        out.sum().backward()
        assert "'head.weight' was needed in its own backward" in seen[0]

    on(2, body)


def test_a_placeholder_is_whole_in_another_backward() -> None:
    """Also where nothing is gathered before somebody asks, as gradients have been clipped once."""

    def body(world: Any) -> Tensor:
        model, optimizer = _distributed(world)
        backward(model, world.rank, 1)
        optimizer.clip_grad_norm_(1.0)
        optimizer.zero_grad()
        backward(model, world.rank, 0)
        seen: list[Tensor] = []
        other = nn.Linear(3, 2)(torch.ones(1, 3))
        other.register_hook(lambda _grad: seen.append(_head(model).clone()))
        other.sum().backward()
        return seen[0]

    wanted = _mean()
    for got in on(2, body):
        torch.testing.assert_close(got, wanted)


def test_a_placeholder_has_the_kind_of_its_view() -> None:
    def body(world: Any) -> None:
        model = nn.Linear(3, 2).to(torch.float64)
        strategy = wingbeat.DeAR(plan="fixed")
        optimizer = torch.optim.SGD(model.parameters())
        model, _ = wingbeat.distribute(model, optimizer, strategy, world=world)
        model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
        assert model._parameters["weight"].grad.dtype is torch.float64

    on(2, body)


class Spy(torch.Tensor):
    """Notes for each call on it whether it reads values."""

    seen: list[bool]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Spy.seen.append(reads_values(func, args, kwargs))
        return super().__torch_function__(func, types, args, kwargs or {})


def _reads(look: Any) -> bool:
    tensor = torch.ones(2, 2).as_subclass(Spy)
    Spy.seen = []
    look(tensor)
    assert Spy.seen, "nothing was called"
    return Spy.seen[0]


@pytest.mark.parametrize(
    "look",
    [
        lambda t: t.shape,
        lambda t: t.dtype,
        lambda t: t.grad,
        lambda t: setattr(t, "grad", None),
        lambda t: t.size(0),
        lambda t: t.numel(),
        lambda t: len(t),
        lambda t: t.is_contiguous(),
        lambda t: t.type(),
        lambda t: t.requires_grad_(),
        lambda t: t._version,
    ],
)
def test_metadata_access_reads_no_values(look: Any) -> None:
    assert not _reads(look)


@pytest.mark.parametrize(
    "look",
    [
        lambda t: t.data,
        lambda t: setattr(t, "data", torch.zeros(2, 2)),
        lambda t: t.T,
        lambda t: t.type(torch.float64),
        lambda t: t.type(dtype=torch.float64),
        lambda t: t.mul_(2),
        lambda t: t.data_ptr(),
        lambda t: t.tolist(),
        lambda t: t.clone(),
        lambda t: torch.add(1, t),
        lambda t: t.view(4),
        lambda t: t[0],
    ],
)
def test_value_access_reads_values(look: Any) -> None:
    assert _reads(look)


def test_tensors_in_nested_arguments_are_found() -> None:
    a, b, c, d = (torch.tensor(float(n)) for n in range(4))
    found = list(tensors_in(((a, [b, 1]), {"out": (c,), "more": {"deep": d}, "no": None})))
    assert [float(t) for t in found] == [0.0, 1.0, 2.0, 3.0]


def shown() -> tuple[MixedGradients, list[Slot]]:
    """ShownGradients after an exchange, of two parameters; the optimizer updates the first one."""
    slots = [Slot(i, f"p{i}", torch.nn.Parameter(torch.ones(3))) for i in range(2)]
    bucketing: Any = SimpleNamespace(slots=slots, buckets=[Bucket(0, slots)])
    slots[0].owned = True
    views = MixedGradients(bucketing)
    views.begin_backward()
    for slot in slots:
        slot.used = True
    views.on_gradients(slots)
    views.show()
    return views, slots


def test_backward_on_exchanged_gradients_is_refused() -> None:
    views, slots = shown()
    for _ in range(2):
        with pytest.raises(UsageError, match=r"'p0' .* before each backward call optimizer\.zero"):
            views.begin_backward()
    slots[0].param.grad = None
    with pytest.raises(UsageError, match=r"'p1' .* before each backward call model\.zero_grad"):
        views.begin_backward()
    slots[1].param.grad = torch.ones(3)  # somebody's own
    views.begin_backward()


def test_backward_on_gradients_zeroed_in_place_is_allowed() -> None:
    views, slots = shown()
    views.on_zero_grad(set_to_none=False)
    with pytest.raises(UsageError, match="'p1'"):
        views.begin_backward()
    slots[1].param.grad = None
    views.begin_backward()
    views.show()
    with pytest.raises(UsageError, match="'p0'"):
        views.begin_backward()
