"""What a worker has not sent stays with its parameter, whatever bucket, rank or run it is in."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.amounts import examples
from wingbeat.codecs.feedback import FORMAT, Residuals
from wingbeat.errors import UsageError

CPU = torch.device("cpu")
SHAPES = {"weight": (3, 4), "bias": (4,), "scale": (), "none": (0, 5)}
NUMELS = {name: torch.Size(shape).numel() for name, shape in SHAPES.items()}


def made(rank: int = 0, world_size: int = 1, **options: Any) -> Residuals:
    return Residuals(SHAPES, rank=rank, world_size=world_size, **options)


def flat(residuals: Residuals, *names: str, padding: int = 0, velocity: bool = False) -> Any:
    numels = [NUMELS[name] for name in names]
    get = residuals.velocity_for if velocity else residuals.flat_for
    return get(names, numels, sum(numels) + padding, CPU)


def filled(rank: int, world_size: int, **options: Any) -> Residuals:
    """Residuals with other values in every element and on every rank."""
    residuals = made(rank, world_size, **options)
    generator = torch.Generator().manual_seed(rank)
    for velocity in (False, True) if options.get("velocity") else (False,):
        buffer = flat(residuals, *SHAPES, velocity=velocity)
        buffer.copy_(torch.randn(buffer.shape, generator=generator))
    return residuals


def kept(residuals: Residuals, kind: str = "residuals") -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = residuals.state_dict()[kind]
    return found


def test_a_new_buffer_is_zero_and_flat() -> None:
    buffer = flat(made(), "bias", "weight", padding=3)
    assert buffer.dtype == torch.float32
    assert buffer.tolist() == [0.0] * 19


def test_new_buckets_lose_nothing_and_padding_starts_at_zero() -> None:
    residuals = made()
    first, second = flat(residuals, "weight", padding=2), flat(residuals, "bias", "scale")
    first.copy_(torch.arange(14.0))
    second.copy_(100 + torch.arange(5.0))
    whole = flat(residuals, "scale", "weight", "none", "bias", padding=4)
    assert whole.tolist() == [104.0, *range(12), 100, 101, 102, 103, 0, 0, 0, 0]
    whole += 1
    assert kept(residuals)["weight"].tolist() == (1 + torch.arange(12.0).view(3, 4)).tolist()
    split = flat(residuals, "bias", padding=1)
    assert split.tolist() == [101, 102, 103, 104, 0]


def test_the_same_arrangement_is_the_same_buffer_and_another_is_not() -> None:
    residuals = made()
    buffer = flat(residuals, "weight", "bias")
    assert flat(residuals, "weight", "bias") is buffer
    assert flat(residuals, "weight", "bias", padding=1) is not buffer
    again = flat(residuals, "bias", "weight")
    assert again is not buffer
    assert flat(residuals, "bias", "weight") is again
    flat(residuals, "weight")
    assert flat(residuals, "bias", "weight") is not again


@settings(deadline=None, max_examples=examples(40))
@given(st.data())
def test_any_sequence_of_arrangements_keeps_every_value(data: st.DataObject) -> None:
    residuals = filled(0, 1)
    want = kept(residuals)
    for _ in range(4):
        order = data.draw(st.permutations(list(SHAPES)))
        cut = data.draw(st.integers(0, len(order)))
        for names in (order[:cut], order[cut:]):
            flat(residuals, *names, padding=data.draw(st.integers(0, 3)))
        for name, value in kept(residuals).items():
            assert torch.equal(value, want[name])


def test_the_state_has_the_parameters_shapes_and_is_a_copy() -> None:
    residuals = made(1, 3)
    buffer = flat(residuals, "weight")
    state = residuals.state_dict()
    assert (state["format"], state["rank"], state["world_size"]) == (FORMAT, 1, 3)
    assert {name: tuple(v.shape) for name, v in state["residuals"].items()} == SHAPES
    buffer.fill_(7)
    assert not state["residuals"]["weight"].any()
    assert "velocity" not in state


def test_a_saved_state_loads_without_pickles_and_is_no_larger_than_its_values() -> None:
    residuals = filled(0, 1)
    file = io.BytesIO()
    torch.save(residuals.state_dict(), file)
    file.seek(0)
    fresh = made()
    fresh.load_state_dict(torch.load(file, weights_only=True))
    for name, value in kept(fresh).items():
        assert torch.equal(value, kept(residuals)[name])
        assert value.untyped_storage().nbytes() == 4 * NUMELS[name]


def test_residuals_are_float32_where_another_dtype_is_the_default() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert {v.dtype for v in made().state_dict()["residuals"].values()} == {torch.float32}
        saved, fresh = filled(0, 1), made()
        fresh.load_state_dict(saved.state_dict())
    finally:
        torch.set_default_dtype(torch.float32)
    for name, value in kept(fresh).items():
        assert torch.equal(value, kept(saved)[name])


@pytest.mark.parametrize("before", [True, False])
def test_loading_reaches_the_buffer_whether_it_was_made_before_or_after(before: bool) -> None:
    saved, residuals = filled(0, 1, velocity=True), made(velocity=True)
    buffers = [flat(residuals, "weight", "bias", velocity=v) for v in (False, True) if before]
    residuals.load_state_dict(saved.state_dict())
    for velocity in (False, True):
        buffer = flat(residuals, "weight", "bias", velocity=velocity)
        want = kept(saved, "velocity" if velocity else "residuals")
        assert torch.equal(buffer, torch.cat([want["weight"].flatten(), want["bias"]]))
        if before:
            assert buffer is buffers[velocity]


def test_a_parameter_alone_in_its_bucket_is_not_taken_for_a_buffer_after_loading() -> None:
    residuals = made()
    state = filled(0, 1).state_dict()
    residuals.load_state_dict(state)
    buffer = flat(residuals, "weight")
    assert buffer.shape == (12,)
    buffer.zero_()
    assert state["residuals"]["weight"].any(), "the loaded state must not be written to"


def test_velocity_and_residual_are_kept_apart() -> None:
    residuals = made(velocity=True)
    flat(residuals, "bias").fill_(1)
    flat(residuals, "bias", velocity=True).fill_(2)
    flat(residuals, "weight", "bias")
    assert flat(residuals, "bias", "scale", velocity=True).tolist() == [2, 2, 2, 2, 0]
    assert kept(residuals)["bias"].tolist() == [1] * 4


def test_clear_forgets_in_place() -> None:
    residuals = filled(0, 1)
    buffer = flat(residuals, *SHAPES)
    residuals.clear()
    assert not buffer.any()
    assert flat(residuals, *SHAPES) is buffer


def test_rank_0s_part_starts_the_others_at_zero() -> None:
    state = filled(0, 2).state_dict()
    for rank in (0, 1):
        residuals = filled(rank, 2)
        residuals.load_state_dict(state)
        want = state["residuals"]["weight"] if rank == 0 else torch.zeros(3, 4)
        assert torch.equal(kept(residuals)["weight"], want)


@pytest.mark.parametrize(("before", "after"), [(1, 1), (4, 4), (4, 2), (5, 3), (2, 5), (3, 1)])
def test_another_number_of_workers_owes_the_same_together(before: int, after: int) -> None:
    states = [filled(rank, before, velocity=True).state_dict() for rank in range(before)]
    loaded = [made(rank, after, velocity=True) for rank in range(after)]
    for residuals in loaded:
        residuals.load_state_dicts(states[::-1])
    for kind in ("residuals", "velocity"):
        for name in SHAPES:
            want = sum(state[kind][name].double() for state in states)
            got = sum(kept(residuals, kind)[name].double() for residuals in loaded)
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    for rank, residuals in enumerate(loaded):
        if before == after:
            assert torch.equal(kept(residuals)["bias"], states[rank]["residuals"]["bias"])
        if rank >= before:
            assert not kept(residuals)["weight"].any()


def test_a_part_without_velocity_starts_it_at_zero() -> None:
    residuals = filled(0, 1, velocity=True)
    residuals.load_state_dict(filled(0, 1).state_dict())
    assert not kept(residuals, "velocity")["weight"].any()
    assert kept(residuals)["weight"].any()


def test_other_float_dtypes_are_taken() -> None:
    state = filled(0, 1).state_dict()
    state["residuals"] = {name: value.double() for name, value in state["residuals"].items()}
    residuals = made()
    residuals.load_state_dict(state)
    assert kept(residuals)["weight"].dtype == torch.float32
    assert torch.equal(kept(residuals)["weight"].double(), state["residuals"]["weight"])


def _without(state: Any, *path: str) -> Any:
    *way, last = path
    for key in way:
        state = state[key]
    del state[last]


def _with(state: Any, value: Any, *path: str) -> None:
    *way, last = path
    for key in way:
        state = state[key]
    state[last] = value


DAMAGE: dict[str, tuple[Any, str]] = {
    "format": (lambda s: _with(s, "other", "format"), "not made by state_dict"),
    "rank": (lambda s: _with(s, 9, "rank"), "rank 9"),
    "bool rank": (lambda s: _with(s, True, "rank"), "rank True"),
    "no size": (lambda s: _without(s, "world_size"), "world_size None"),
    "no residuals": (lambda s: _without(s, "residuals"), "NoneType"),
    "missing": (lambda s: _without(s, "residuals", "bias"), "'bias' is missing"),
    "foreign": (lambda s: _with(s, torch.ones(1), "residuals", "head.x"), "'head.x' is not"),
    "shape": (lambda s: _with(s, torch.ones(4, 3), "residuals", "weight"), "'weight' has shape"),
    "no tensor": (lambda s: _with(s, [1.0], "residuals", "bias"), "'bias' has no tensor"),
    "integers": (lambda s: _with(s, torch.ones(4).int(), "residuals", "bias"), "'bias' has no"),
    "nan": (lambda s: s["residuals"]["bias"].fill_(float("nan")), "'bias' has values that are not"),
    "inf": (lambda s: s["residuals"]["scale"].fill_(float("inf")), "'scale' has values"),
    "velocity": (lambda s: _with(s, {}, "velocity"), "momentum"),
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("many", [False, True])
def test_a_damaged_part_is_named_and_changes_nothing(kind: str, many: bool) -> None:
    damage, said = DAMAGE[kind]
    states = [filled(rank + 5, 7).state_dict() | {"rank": rank} for rank in range(2)]
    for state in states:
        state["world_size"] = 2
    damage(states[1])
    residuals = filled(1, 2)
    before = copy.deepcopy(residuals.state_dict())
    load: Any = residuals.load_state_dicts if many else residuals.load_state_dict
    with pytest.raises(UsageError) as caught:
        load(states if many else states[1])
    text = str(caught.value)
    assert said in text
    assert "\n" not in text
    for name, value in kept(residuals).items():
        assert torch.equal(value, before["residuals"][name])


def _parts(*ranks: int, size: int = 3) -> list[Any]:
    return [filled(rank, size).state_dict() for rank in ranks]


@pytest.mark.parametrize(
    ("states", "said"),
    [
        ([], "load_state_dicts(list)"),
        ("abc", "load_state_dicts(str)"),
        ([None], "states[0]"),
        (_parts(0, 2), "rank 1 is missing"),
        (_parts(0, 1, 1, 2), "rank 1 occurs twice"),
        ([*_parts(0, 1), *_parts(2, size=4)], "rank 2's of one with 4"),
    ],
)
def test_an_incomplete_set_of_parts_is_named(states: Any, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        made(0, 3).load_state_dicts(states)
    assert said in str(caught.value)


def test_parts_of_a_column_are_named_by_replica() -> None:
    with pytest.raises(UsageError, match="the part of replica 1 is missing"):
        made(0, 3, worker="replica").load_state_dicts(_parts(0, 2))
    damaged = _parts(1)
    del damaged[0]["residuals"]["bias"]
    with pytest.raises(UsageError, match="residuals of replica 1's part: parameter 'bias' is"):
        made(0, 3, worker="replica").load_state_dict(damaged[0])


def test_parts_with_and_without_velocity_do_not_mix() -> None:
    states = [filled(0, 2, velocity=True).state_dict(), filled(1, 2).state_dict()]
    with pytest.raises(UsageError, match="rank 1's part has no velocity"):
        made(0, 2, velocity=True).load_state_dicts(states)


def test_one_part_of_another_number_of_workers_needs_all_of_them() -> None:
    with pytest.raises(UsageError, match="load_state_dicts"):
        made(0, 2).load_state_dict(filled(0, 3).state_dict())


@pytest.mark.gpu
def test_buffers_move_between_devices() -> None:
    residuals = filled(0, 1)
    want = kept(residuals)["weight"]
    moved = residuals.flat_for(["weight"], [12], 12, torch.device("cuda", 0))
    assert moved.device.type == "cuda"
    assert torch.equal(moved.cpu(), want.flatten())
    assert residuals.flat_for(["weight"], [12], 12, torch.device("cuda")) is moved


def test_a_buffer_that_another_parameter_is_in_too_is_not_given_to_one_alone() -> None:
    """Padding may make the buffers of [a, b] and of [a] equally long."""
    made = Residuals({"a": (4000,), "b": (1,)}, rank=0, world_size=8)
    both = made.flat_for(["a", "b"], [4000, 1], 4008, torch.device("cpu"))
    both[:4001] = 1.0
    alone = made.flat_for(["a"], [4000], 4008, torch.device("cpu"))
    assert not alone[4000:].any()
    assert made.state_dict()["residuals"]["b"].item() == 1.0


def test_a_residual_is_taken_once_and_then_starts_at_zero() -> None:
    made = Residuals({"a": (4000,), "b": (8,)}, rank=0, world_size=1)
    assert made.take("a") is None, "there was no residual yet"
    assert made.empty
    made.flat_for(["a", "b"], [4000, 8], 4008, torch.device("cpu")).fill_(2.0)
    taken = made.take("a")
    assert taken is not None
    assert taken.tolist() == [2.0] * 4000
    assert made.take("a") is None
    assert not made.empty, "b has one"
    again = made.flat_for(["a", "b"], [4000, 8], 4008, torch.device("cpu"))
    assert not again[:4000].any()
    assert again[4000:].tolist() == [2.0] * 8
