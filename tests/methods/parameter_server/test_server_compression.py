"""What gradients travel as to servers and back: the bits, the bytes, and that nothing is lost."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import wingbeat
from helpers.amounts import examples
from helpers.training import assert_same, engine, on, weights
from wingbeat.compression import Half, LowRank, Sketch
from wingbeat.methods.parameter_server.launch import MEMORY_FACTOR

SIZE = 3
SHAPES = ((60, 40), (9,), (), (700,), (300, 8))
SKETCH, LOW = Sketch(bits=2, auto_disable=False), LowRank(rank=2, auto_disable=False)


class Pull(nn.Module):
    """Its gradient is whatever it is called with, so that a test knows what was put in."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(s, dtype=dtype)) for s in SHAPES)

    def forward(self, pulls: list[torch.Tensor | None]) -> torch.Tensor:
        pairs = zip(self.parts, pulls, strict=True)
        return sum((p * g).sum() for p, g in pairs if g is not None)


def pulls(step: int, rank: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [(torch.randn(shape, generator=generator) ** 3).to(dtype) for shape in SHAPES]


def distributed(world: Any, wire: Any, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    options = {"servers": 2, "slice": 1500, "mb": 0.02, "encrypted": False, **more}
    model = Pull(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    how = wingbeat.Geryon(compression=wire, **options)
    return wingbeat.distribute(model, optimizer, how, world=world)


def step_on(model: Any, optimizer: Any, given: list[torch.Tensor | None]) -> None:
    optimizer.zero_grad()
    model(given).backward()
    optimizer.step()


# -- casts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("pull", ["ready", "start"])
@pytest.mark.parametrize("back", ["wire", "dense"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_cast_rounds_in_transit_and_sums_in_float32(dtype, back, pull) -> None:
    def body(world: Any) -> Any:
        model, optimizer = distributed(world, "bf16", dtype, back=back, pull=pull)
        step_on(model, optimizer, pulls(0, world.rank, dtype))
        return weights(model)

    first, *others = on(SIZE, body)
    for other in others:
        assert_same(other, first)
    travels = torch.bfloat16 if dtype.itemsize > 2 else dtype  # no cast that saves nothing
    for place, value in enumerate(first.values()):
        total = torch.zeros(SHAPES[place])
        for rank in range(SIZE):
            grad = pulls(0, rank, dtype)[place] * (1 / SIZE)
            total = total + grad.to(travels).float() if rank else grad.to(travels).float()
        wanted = total if back == "dense" else total.to(travels)
        assert torch.equal(value, -wanted.to(dtype)), SHAPES[place]


# -- bytes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wire", "back", "up", "down"),
    [
        ("fp32", "wire", 1.0, 1.0),
        ("bf16", "wire", 0.5, 0.5),
        ("bf16", "dense", 0.5, 1.0),
        (Half(), "wire", 0.5, 0.5),
        (Sketch(auto_disable=False), "wire", 0.25, 0.25),
        (Sketch(auto_disable=False), "dense", 0.25, 1.0),
        (Sketch(bits=4, auto_disable=False), "wire", 0.125, 0.125),
    ],
)
def test_compression_reduces_bytes_in_both_directions(wire, back, up, down) -> None:
    shape = (1000, 300)

    def body(world: Any) -> Any:
        model = nn.Linear(shape[1], shape[0], bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        how = wingbeat.Geryon(
            compression=wire, back=back, servers=2, classes=1, slice=1 << 16, encrypted=False
        )
        wingbeat.distribute(model, optimizer, how, world=world)
        client = engine(model).runtime.exchange._client
        out, post = [0, 0], client.mailbox.post
        handle = client.handle

        def posting(peer: int, kind: int, payload: Any = b"", **more: Any) -> Any:
            out[0] += memoryview(payload).nbytes
            return post(peer, kind, payload, **more)

        def handling(message: Any, record: Any) -> None:
            out[1] += len(message.payload)
            handle(message, record)

        client.mailbox.post, client.handle = posting, handling
        model(torch.randn(4, shape[1])).square().sum().backward()
        optimizer.step()
        wingbeat.synchronize(model)
        return out

    dense = 4 * shape[0] * shape[1]
    for pushed, came in on(2, body):
        assert pushed / dense == pytest.approx(up, rel=0.04)
        assert came / dense == pytest.approx(down, rel=0.04)


@pytest.mark.parametrize(("wire", "back"), [("bf16", "dense"), (SKETCH, "dense"), (SKETCH, "wire")])
def test_uncut_slices_fit_float32_sums(wire: Any, back: str) -> None:
    """What comes back, or is left, may take twice the bytes of the gradients."""

    def body(world: Any) -> Any:
        model = nn.Linear(1100, 8000, bias=False).to(torch.bfloat16)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        how = wingbeat.Geryon(compression=wire, back=back, servers=1, slice=0, encrypted=False)
        wingbeat.distribute(model, optimizer, how, world=world)
        model(torch.ones(1, 1100, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        wingbeat.synchronize(model)
        optimizer.state_dict()
        for started in engine(model).runtime.exchange._servers._started:
            assert started._config.max_sum_bytes > MEMORY_FACTOR * 4 * model.weight.numel()
        return model.weight.detach().clone()

    first, second = on(2, body)
    assert torch.equal(first, second)


# -- residuals ------------------------------------------------------------------------------


def kept(optimizer: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = optimizer.residual_state_dict()["residuals"]
    return found


@pytest.mark.parametrize("pull", ["ready", "start"])
@pytest.mark.parametrize("wire", [SKETCH, LOW], ids=repr)
def test_training_from_saved_state_gives_same_bits(wire: Any, pull: str) -> None:
    """So all that matters is in it, and none of it at a server that goes on."""

    def body(world: Any) -> Any:
        model, optimizer = distributed(world, wire, pull=pull)
        for step in range(3):
            step_on(model, optimizer, pulls(step, world.rank))
        state = optimizer.state_dict()
        values = {k: v.clone() for k, v in model.state_dict().items()}
        ends = []
        for _ in range(2):
            model.load_state_dict(values)
            optimizer.load_state_dict(state)
            for step in range(3, 6):
                step_on(model, optimizer, pulls(step, world.rank))
            ends.append((weights(model), kept(optimizer)))
        return ends

    for first, second in on(SIZE, body):
        assert_same(second, first)


def test_save_moves_all_residuals_to_workers() -> None:
    def body(world: Any) -> Any:
        model, optimizer = distributed(world, SKETCH, slice=500)
        for step in range(2):
            step_on(model, optimizer, pulls(step, world.rank))
        wingbeat.synchronize(model)
        exchange = engine(model).runtime.exchange
        world.exchange("all have their sums", True)
        own = engine(model).compression.residuals
        before = {name: value.clone() for name, value in own._kinds["residuals"]._values.items()}
        gained = {
            name: bool((v - before[name].view(v.shape)).any())
            for name, v in kept(optimizer).items()
        }
        assert not exchange._uncollected
        twice = kept(optimizer)
        assert_same(kept(optimizer), twice)
        return gained

    gained = on(SIZE, body)
    assert all(any(each.values()) for each in gained), "each asks for some slices"
    assert any(not all(each.values()) for each in gained), "and for no others"


def test_save_with_dense_sums_sends_no_requests() -> None:
    def body(world: Any) -> Any:
        found = []
        for wire, back in ((SKETCH, "dense"), (Half(), "wire"), (SKETCH, "wire")):
            model, optimizer = distributed(world, wire, back=back)
            step_on(model, optimizer, pulls(0, world.rank))
            found.append(bool(engine(model).runtime.exchange._uncollected))
        return found

    assert on(2, body) == 2 * [[False, False, True]]


Program = list[tuple[str, int]]

_PROGRAMS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.integers(0, 2**15 - 1)),  # bits: who uses which parameter
        st.tuples(st.just("buckets"), st.sampled_from([400, 5000, 60_000, 1 << 20])),
        st.tuples(st.just("save"), st.integers(1, 4)),  # and go on with so many workers
        st.tuples(st.just("off"), st.integers(0, 1)),
    ),
    min_size=2,
    max_size=8,
)


@settings(
    max_examples=examples(50), deadline=None, phases=[Phase.generate]
)  # a failure takes seconds
@given(
    _PROGRAMS,
    st.sampled_from([SKETCH, LOW]),
    st.sampled_from(["ready", "start"]),
    st.sampled_from(["worker", "server"]),
)
def test_applied_updates_and_residuals_equal_all_gradients(
    program: Program, wire: Any, pull: str, update: str
) -> None:
    """Over new buckets, with the codec off at times, and on another number of workers."""
    wanted = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    lives, size, count = [[]], 2, 0
    for what, value in program:
        if what == "save":
            lives.append([])
        lives[-1].append((what, value))
    state: Any = None
    for life in lives:
        size = life[0][1] if life and life[0][0] == "save" else size
        results = on(
            size,
            functools.partial(
                _live, life=life, loads=state, wire=wire, first=count, pull=pull, update=update
            ),
        )
        for what, value in life:
            if what == "step":
                for rank in range(size):
                    for total, grad in zip(wanted, _given(count, rank, value), strict=True):
                        total += 0.0 if grad is None else grad.double() / size
                count += 1
        for other, _ in results[1:]:
            assert_same(other, results[0][0])
        state = results[0][0], [part for _, part in results]
    moved, parts = state
    for (name, value), want in zip(moved.items(), wanted, strict=True):
        total = -value.double() + sum(part["residuals"][name].double() for part in parts)
        torch.testing.assert_close(total, want, rtol=1e-4, atol=1e-4, msg=name)


def _given(step: int, rank: int, bits: int) -> list[torch.Tensor | None]:
    """Some parameters are not used by this worker, or by any; the third one always is."""
    nobodys, mine = bits & 31, bits >> 5 * (1 + rank % 2) & 31
    unused = (nobodys | mine) & ~4
    return [None if unused >> i & 1 else p for i, p in enumerate(pulls(step, rank))]


def _live(world: Any, life: Program, loads: Any, wire: Any, first: int, **more: Any) -> Any:
    model, optimizer = distributed(world, wire, **more)
    if loads is not None:
        values, parts = loads
        model.load_state_dict(values)
        optimizer.load_residuals(parts)
    for what, value in life:
        if what == "step":
            step_on(model, optimizer, _given(first, world.rank, value))
            first += 1
        elif what == "buckets":
            bucketing = engine(model).bucketing
            bucketing.use(dataclasses.replace(bucketing.fusion, bucket_bytes=value))
        elif what == "off":
            engine(model).compression.on = not value
    wingbeat.synchronize(model)
    found = {name: value.clone() for name, value in weights(model).items()}
    return found, optimizer.residual_state_dict()


# -- training -------------------------------------------------------------------------------


@functools.cache
def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    return torch.tensor(digits.data, dtype=torch.float32) / 16.0, torch.tensor(digits.target)


def _trained(
    world: Any, wire: Any, back: str, update: str = "worker"
) -> tuple[float, dict[str, torch.Tensor]]:
    """Two thirds of the digits, 120 steps; the share of the others that it gets right."""
    images, labels = _digits()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(3))
    model: Any = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    how = wingbeat.Geryon(compression=wire, back=back, update=update, servers=2, encrypted=False)
    wingbeat.distribute(model, optimizer, how, world=world)
    for step in range(120):
        chosen = order[(step * SIZE + world.rank) * 16 % 1180 :][:16]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()
    wingbeat.synchronize(model)
    rest = order[1200:]
    right = (model(images[rest]).argmax(1) == labels[rest]).float().mean().item()
    return right, weights(model)


@pytest.mark.parametrize(
    ("wire", "back"),
    [
        (Sketch(auto_disable=False), "wire"),
        (Sketch(bits=4, auto_disable=False), "wire"),
        (Sketch(bits=4, auto_disable=False), "dense"),
        (LowRank(rank=4, auto_disable=False), "wire"),
        ("bf16", "wire"),
    ],
)
def test_digits_accuracy_with_codec_equals_without(wire: Any, back: str) -> None:
    results = on(SIZE, lambda world: _trained(world, wire, back))
    for _, other in results[1:]:
        assert_same(other, results[0][1])
    assert _dense() > 0.9
    assert results[0][0] > _dense() - 0.02


def test_digits_accuracy_with_server_updates_and_sketch() -> None:
    wire = Sketch(bits=4, auto_disable=False)
    right = on(SIZE, lambda world: _trained(world, wire, "wire", "server"))[0][0]
    assert right > _dense() - 0.02


@functools.cache
def _dense() -> float:
    return on(SIZE, lambda world: _trained(world, "fp32", "wire"))[0][0]
