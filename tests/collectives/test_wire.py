"""Elements that travel in a narrower dtype: the same bits everywhere, near the exact sum."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import late
from helpers.amounts import examples
from wingbeat.collectives import Collectives, packing, wire_dtype
from wingbeat.errors import UsageError
from wingbeat.transport import loopback
from wingbeat.transport.world import World

WIRES = [torch.bfloat16, torch.float16]
WIDE = [torch.float32, torch.float64]
TOPOLOGIES = ["ring", "mesh"]


def inputs(size: int, numel: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """Numbers of many magnitudes, both signs."""
    generator = torch.Generator().manual_seed(seed)
    shape = (size, numel)
    exponent = torch.randint(-4, 5, shape, generator=generator)
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64) * 2.0**exponent
    return list(numbers.to(dtype))


def in_halves(collectives: Collectives, buffer: torch.Tensor, wire: torch.dtype) -> None:
    """As DeAR does it: the gather is queued before the reduction is done."""
    scattered = collectives.reduce_scatter(buffer, wire=wire)
    collectives.all_gather(buffer, after=scattered, wire=wire).wait()


def tolerance(values: list[torch.Tensor], wire: torch.dtype) -> torch.Tensor:
    """P roundings to the wire's nearest value, and P-1 of sums in the buffer's own dtype."""
    size, own = len(values), torch.finfo(values[0].dtype)
    narrow = torch.finfo(wire)
    magnitude = torch.stack([v.double().abs() for v in values]).sum(0)
    relative = 0.51 * size * narrow.eps + size * own.eps
    return relative * magnitude + size * narrow.smallest_normal * narrow.eps


@settings(max_examples=examples(60))
@given(
    size=st.integers(1, 5),
    numel=st.one_of(st.integers(0, 9), st.sampled_from([64, 1001, 70_003, 200_001])),
    topology=st.sampled_from(TOPOLOGIES),
    wire=st.sampled_from(WIRES),
    dtype=st.sampled_from(WIDE),
    interfaces=st.integers(1, 2),
    seed=st.integers(0, 99),
)
def test_sums_have_the_same_bits_everywhere_and_one_rounding_a_hop(
    size, numel, topology, wire, dtype, interfaces, seed
) -> None:
    values = inputs(size, numel, dtype, seed)

    def body(world: World) -> tuple[torch.Tensor, torch.Tensor]:
        collectives = Collectives(world, topology)
        whole, halves = values[world.rank].clone(), values[world.rank].clone()
        collectives.all_reduce(whole, wire=wire).wait()
        in_halves(collectives, halves, wire)
        return whole, halves

    with late.open_worlds(size, interfaces) as (members, _):
        results = loopback.run(members, body)
    for whole, halves in results:
        assert whole.dtype is dtype
        assert torch.equal(whole, results[0][0])
        assert torch.equal(halves, whole)
    exact = torch.stack([v.double() for v in values]).sum(0)
    result = results[0][0]
    assert ((result.double() - exact).abs() <= tolerance(values, wire)).all()
    if size == 1:
        assert torch.equal(result, values[0])
    else:
        assert torch.equal(result, result.to(wire).to(dtype))


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("wire", WIRES, ids=str)
def test_a_reduced_block_is_not_rounded_before_it_is_gathered(topology, wire) -> None:
    """The owner adds its own contribution in full: 1 + 2**-20 is in neither wire dtype."""
    values = [torch.zeros(50), torch.zeros(50), torch.zeros(50)]

    def body(world: World) -> bool:
        collectives = Collectives(world, topology)
        own = collectives.owned(50)
        buffer = values[world.rank]
        buffer[own.start : own.stop] = 1 + 2**-20
        collectives.reduce_scatter(buffer, wire=wire).wait()
        kept = bool((buffer[own.start : own.stop] == 1 + 2**-20).all())
        collectives.all_gather(buffer, wire=wire).wait()
        return kept and torch.equal(buffer, torch.ones(50))

    with late.open_worlds(3) as (members, _):
        assert loopback.run(members, body) == [True] * 3


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize(("dtype", "part"), [(torch.float32, 2), (torch.float64, 4)], ids=str)
def test_the_bytes_that_travel_shrink_with_the_dtype(topology, dtype, part) -> None:
    def sent(wire: torch.dtype | None) -> dict[int, int]:
        def body(world: World) -> None:
            collectives = Collectives(world, topology)
            for numel in (3, 1001, 300_000):
                buffer = torch.ones(numel, dtype=dtype)
                collectives.all_reduce(buffer, wire=wire).wait()
                collectives.reduce_scatter(buffer, wire=wire).wait()
                collectives.all_gather(buffer, wire=wire).wait()

        with late.open_worlds(3) as (members, board):
            loopback.run(members, body)
        return board.nbytes

    whole = sent(None)
    assert sum(whole.values()) == 4 * 2 * (3 + 1001 + 300_000) * dtype.itemsize
    for wire in WIRES:
        assert {rank: part * n for rank, n in sent(wire).items()} == whole


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("halves", [False, True], ids=["whole", "halves"])
def test_value_too_large_for_fp16_arrives_as_infinite(topology, halves) -> None:
    contributions = torch.tensor(
        [
            [30000.0, 70000.0, -70000.0, 1e30, float("inf"), 40000.0, 0.0],
            [30000.0, 0.0, 0.0, -1e30, 0.0, -float("inf"), float("nan")],
            [1000.0, 0.0, 0.0, 1e30, 0.0, 0.0, 0.0],
        ]
    )

    def body(world: World) -> torch.Tensor:
        collectives = Collectives(world, topology)
        buffer = contributions[world.rank].repeat(40)
        if halves:
            in_halves(collectives, buffer, torch.float16)
        else:
            collectives.all_reduce(buffer, wire=torch.float16).wait()
        return buffer

    with late.open_worlds(3) as (members, _):
        results = loopback.run(members, body)
    columns = results[0].reshape(40, 7).T
    assert ((columns[0] - 61000).abs() <= 64).all()
    assert (columns[1] == float("inf")).all()
    assert (columns[2] == -float("inf")).all()
    assert not columns[3].isfinite().any()
    assert (columns[4] == float("inf")).all()
    assert (columns[5] == -float("inf")).all()
    assert columns[6].isnan().all()
    for result in results:
        assert torch.equal(result.view(torch.int32), results[0].view(torch.int32))


@settings(max_examples=examples(40))
@given(
    rows=st.integers(2, 4).flatmap(
        lambda size: st.lists(
            st.lists(
                st.floats(-1e6, 1e6, width=32) | st.sampled_from([float("inf"), float("nan")]),
                min_size=size,
                max_size=size,
            ),
            min_size=1,
            max_size=12,
        )
    ),
    topology=st.sampled_from(TOPOLOGIES),
)
def test_an_overflow_is_never_a_finite_number(rows, topology) -> None:
    values = torch.tensor(rows).T.contiguous()

    def body(world: World) -> torch.Tensor:
        buffer = values[world.rank].clone()
        in_halves(Collectives(world, topology), buffer, torch.float16)
        return buffer

    with late.open_worlds(len(values)) as (members, _):
        result = loopback.run(members, body)[0]
    # A sum on its way may overflow where the last one would not: more is lost then, never less.
    exact = values.double().sum(0)
    lost = ~exact.isfinite() | (exact.abs() > 65504 * 1.01)
    assert not result[lost].isfinite().any()


def test_bf16_has_the_range_of_fp32() -> None:
    def body(world: World) -> torch.Tensor:
        buffer = torch.tensor([1e38, 1e-38, 1e-30] * 5)
        Collectives(world).all_reduce(buffer, wire=torch.bfloat16).wait()
        return buffer

    with late.open_worlds(2) as (members, _):
        result = loopback.run(members, body)[1]
    assert torch.allclose(result, torch.tensor([2e38, 2e-38, 2e-30] * 5), rtol=0.02, atol=0.0)


@pytest.mark.parametrize("wire", WIRES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_narrow_and_integer_buffers_are_not_cast(wire, dtype) -> None:
    """0.1 and 257 change when they are cast to the other half-precision dtype."""
    source = torch.tensor([0.1, 257.0, 1.0, 0.0, 3.0]).to(dtype)

    def body(world: World) -> tuple[torch.Tensor, torch.Tensor]:
        buffer, gathered = source.clone(), source.clone()
        if dtype is not torch.bool:
            Collectives(world).all_reduce(buffer, wire=wire).wait()
        Collectives(world).all_gather(gathered, wire=wire).wait()
        return buffer, gathered

    with late.open_worlds(2) as (members, _):
        for summed, gathered in loopback.run(members, body):
            assert torch.equal(gathered, source)
            if dtype is not torch.bool:
                assert torch.equal(summed, source + source)


def test_a_world_of_one_rounds_nothing() -> None:
    buffer = torch.tensor([0.1, 1e9])
    with late.open_worlds(1) as (members, _):
        in_halves(Collectives(members[0]), buffer, torch.float16)
        Collectives(members[0]).all_reduce(buffer, wire=torch.float16).wait()
    assert torch.equal(buffer, torch.tensor([0.1, 1e9]))


def test_other_dtypes_are_refused_with_the_allowed_ones() -> None:
    with late.open_worlds(1) as (members, _):
        collectives = Collectives(members[0])
        for wire in (torch.int8, torch.float32, torch.float8_e5m2, "bfloat61"):
            with pytest.raises(UsageError, match=rf"wire = {wire}: allowed are bfloat16, float16"):
                collectives.all_reduce(torch.ones(4), wire=wire)
    with pytest.raises(UsageError, match=r"'bfloat61' \(did you mean 'bfloat16'\?\)"):
        wire_dtype("bfloat61")
    assert [wire_dtype(name) for name in ("bfloat16", "float16", "")] == [*WIRES, None]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_many_collectives_in_flight_do_not_share_scratch(topology) -> None:
    """The late link reads a chunk when the peer takes it, so scratch given back early shows."""
    values = [inputs(3, 40_000 + 17 * i, torch.float32, seed=i) for i in range(8)]

    def body(world: World) -> list[torch.Tensor]:
        collectives = Collectives(world, topology)
        buffers = [v[world.rank].clone() for v in values]
        reduced = [
            collectives.reduce_scatter(b, bucket=i, wire=torch.bfloat16)
            for i, b in enumerate(buffers)
        ]
        gathered = [
            collectives.all_gather(buffers[i], bucket=i, after=reduced[i], wire=torch.bfloat16)
            for i in reversed(range(8))
        ]
        for handle in gathered:
            handle.wait_received()
        for handle in gathered:
            handle.wait()
        return buffers

    with late.open_worlds(3, interfaces=2) as (members, _):
        results = loopback.run(members, body)
    for i, each in enumerate(values):
        exact = torch.stack([v.double() for v in each]).sum(0)
        error = (results[0][i].double() - exact).abs()
        assert (error <= tolerance(each, torch.bfloat16)).all()
        assert all(torch.equal(result[i], results[0][i]) for result in results)


def test_chunks_use_the_same_memory_again(monkeypatch) -> None:
    made = []
    empty = torch.empty

    def counted(*args, **kwargs):
        made.append(args)
        return empty(*args, **kwargs)

    monkeypatch.setattr(packing.torch, "empty", counted)

    def iterations(world: World, count: int) -> None:
        collectives = Collectives(world)
        for _ in range(count):
            buffer = torch.ones(300_000)
            collectives.reduce_scatter(buffer, wire=torch.bfloat16).wait()
            collectives.all_gather(buffer, wire=torch.bfloat16).wait()

    with late.open_worlds(2) as (members, _):
        loopback.run(members, lambda world: iterations(world, 2))
        warm = len(made)
        assert warm > 0
        loopback.run(members, lambda world: iterations(world, 5))
        assert len(made) == warm
