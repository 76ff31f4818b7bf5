"""Collectives whose chunks a codec writes: the same bits everywhere, the rest in residuals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import late
from helpers.amounts import examples
from wingbeat import compression
from wingbeat.codecs import Coding, make
from wingbeat.codecs.codec import Dense
from wingbeat.codecs.coding import Region
from wingbeat.collectives import Collectives, Encoded
from wingbeat.errors import PeerError
from wingbeat.observe.events import stream
from wingbeat.transport import loopback
from wingbeat.transport.world import World
from wingbeat.types import Span


def test_waiting_twice_decodes_once() -> None:
    """The buffer is the caller's after the first: here it has been divided."""

    def body(world: World) -> torch.Tensor:
        buffer = torch.full((50,), 3.0)
        handle = Collectives(world).all_gather_sum(buffer, wire=Encoded(coding("fp16", 50)))
        handle.wait()
        buffer /= world.size
        handle.wait()
        handle.wait_received()
        return buffer

    with late.open_worlds(2) as (members, _):
        for got in loopback.run(members, body):
            assert torch.equal(got, torch.full((50,), 3.0))


def test_second_wait_for_a_failed_sum_fails_again() -> None:
    first, _ = loopback.worlds(2, timeout=0.1)
    handle = Collectives(first).all_gather_sum(torch.ones(50), wire=Encoded(coding("fp16", 50)))
    for wait in (handle.wait, handle.wait_received, handle.wait):
        with pytest.raises(PeerError, match="rank 1 failed during all-gather"):
            wait()


def test_single_worker_encodes_nothing() -> None:
    buffer = torch.linspace(0.1, 1.0, 50)
    [world] = loopback.worlds(1)
    wire = Encoded(coding("topk@0.02", 50), torch.zeros(50))
    Collectives(world).all_gather_sum(buffer, wire=wire).wait()
    assert torch.equal(buffer, torch.linspace(0.1, 1.0, 50))
    world.close()


FLAGS = 3
WIRES = ["sketch", "sketch@3", "topk@0.02", "lowrank@2", "fp16"]


def coding(wire: str, numel: int, cols: int = 0) -> Coding:
    """A buffer with a matrix, if there are ``cols``, and three flags at its end."""
    settings_ = compression.parse(wire)
    assert not isinstance(settings_, str)
    codec = make(settings_)
    body = numel - FLAGS
    rows = body // cols * cols if cols else 0
    regions = [Region(Span(0, rows), codec, cols), Region(Span(rows, body), codec)]
    regions.append(Region(Span(body, numel), Dense()))
    return Coding([r for r in regions if r.span])


def inputs(size: int, numel: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(size, numel, generator=generator) ** 3 * 1e-3
    values[:, -FLAGS:] = torch.tensor([1.0, 0.0, 1.0])
    return list(values)


def exchange(collectives: Collectives, how: str, buffer: torch.Tensor, wire: Encoded) -> None:
    if how == "whole":
        collectives.all_reduce(buffer, wire=wire).wait()
    elif how == "halves":
        scattered = collectives.reduce_scatter(buffer, wire=wire)
        collectives.all_gather(buffer, after=scattered, wire=wire).wait()
    else:
        collectives.all_gather_sum(buffer, wire=wire).wait()


@settings(deadline=None, max_examples=examples(40))
@given(
    size=st.integers(1, 4),
    numel=st.sampled_from([4, 50, 3001, 200_003]),
    cols=st.sampled_from([0, 64]),
    wire=st.sampled_from(WIRES),
    how=st.sampled_from(["whole", "halves", "gathered"]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    interfaces=st.integers(1, 2),
    seed=st.integers(0, 99),
)
def test_encoded_sum_is_equal_everywhere_and_residuals_hold_the_error(
    size, numel, cols, wire, how, dtype, interfaces, seed
) -> None:
    """Over some rounds, what all have got and the residuals make up what was put in."""
    rounds = 3
    values = [inputs(size, numel, seed + 1000 * i) for i in range(rounds)]
    residuals = [torch.zeros(numel) for _ in range(size)]

    def body(world: World) -> list[torch.Tensor]:
        collectives = Collectives(world)
        encoded = Encoded(coding(wire, numel, cols), residuals[world.rank])
        got = []
        for each in values:
            buffer = each[world.rank].to(dtype, copy=True)
            exchange(collectives, how, buffer, encoded)
            got.append(buffer)
        return got

    with late.open_worlds(size, interfaces) as (members, _):
        results = loopback.run(members, body)
    put_in = torch.stack([torch.stack([v.to(dtype).double() for v in each]) for each in values])
    for mine in results[1:]:
        assert all(map(torch.equal, mine, results[0]))
    for round_ in range(rounds):
        assert torch.equal(results[0][round_][-FLAGS:].float(), torch.tensor([size, 0.0, size]))
    total = torch.stack(results[0]).double().sum(0) + torch.stack(residuals).double().sum(0)
    if wire == "fp16" or size == 1:
        return
    # Each rounding is of the buffer's dtype, and of float32 inside.
    eps = torch.finfo(dtype).eps + torch.finfo(torch.float32).eps
    scale = put_in.abs().amax() * size * rounds
    assert (total - put_in.sum((0, 1))).abs().amax() <= 40 * eps * scale


@pytest.mark.parametrize("wire", ["sketch", "fp16", "lowrank@8"])
def test_sums_are_near_the_exact_ones_without_feedback(wire) -> None:
    values = inputs(4, 100_003, 7)

    def body(world: World) -> torch.Tensor:
        buffer = values[world.rank].clone()
        Collectives(world).all_reduce(buffer, wire=Encoded(coding(wire, 100_003))).wait()
        return buffer

    with late.open_worlds(4) as (members, _):
        result = loopback.run(members, body)[0]
    exact = torch.stack(values).sum(0)[:-FLAGS]
    error = (result[:-FLAGS] - exact).norm() / exact.norm()
    assert error < (1e-3 if wire == "fp16" else 0.03)


@pytest.mark.parametrize("how", ["whole", "halves", "gathered"])
@pytest.mark.parametrize("wire", ["sketch", "topk@0.02", "fp16"])
def test_non_finite_values_arrive_everywhere_and_are_in_no_residual(wire, how) -> None:
    values = inputs(3, 5003, 1)
    values[1][17] = torch.nan
    values[2][4000] = torch.inf
    residuals = [torch.zeros(5003) for _ in range(3)]

    def body(world: World) -> torch.Tensor:
        buffer = values[world.rank].clone()
        wired = Encoded(coding(wire, 5003), residuals[world.rank])
        exchange(Collectives(world), how, buffer, wired)
        return buffer

    with late.open_worlds(3) as (members, _):
        results = loopback.run(members, body)
    for result in results:
        assert not result[17].isfinite()
        assert not result[4000].isfinite()
        assert result.isfinite().sum() >= 5001
    assert all(bool(residual.isfinite().all()) for residual in residuals)


def test_malformed_payload_names_its_sender() -> None:
    """Nothing that arrives is trusted: offsets that lead out of the buffer are refused."""
    numel = 5003
    encoded = Encoded(coding("topk@0.02", numel))

    def body(world: World) -> str:
        collectives = Collectives(world)
        if world.rank == 1:
            room = encoded.coding.room(Span(0, numel))
            rows = torch.full((2, -(-room // 8) * 8), 255, dtype=torch.uint8)
            collectives.all_gather(rows.view(-1)).wait()
            return ""
        with pytest.raises(PeerError) as caught:
            collectives.all_gather_sum(torch.ones(numel), wire=encoded).wait()
        return str(caught.value)

    with late.open_worlds(2) as (members, _):
        message = loopback.run(members, body)[0]
    assert message.startswith("rank 0: a gathered sum: rank 1 sent a malformed payload: ")


def test_chunks_that_overlap_the_regions_are_encoded_by_region() -> None:
    """Payload sizes follow from the span alone, for any cut of the buffer."""
    numel = 70_003
    whole = coding("lowrank@2", numel, cols=64)
    values = inputs(1, numel, 3)[0]
    for size in (1, 63, 64, 65, 1000, 65_537, numel):
        got = torch.zeros(numel)
        for span in Span(0, numel).cut(max(size, numel // 50)):
            payload = torch.empty(whole.room(span), dtype=torch.uint8)
            whole.encode(values, span, payload)
            whole.decode(payload, got, span)
        assert torch.equal(got[-FLAGS:], values[-FLAGS:])
        assert (got - values)[:-FLAGS].norm() < 1.1 * values[:-FLAGS].norm()


def test_encoding_for_a_gather_is_on_the_event_stream() -> None:
    """It holds up the caller, as the exchange does not."""
    numel = 3001

    def body(world: World) -> None:
        encoded = Encoded(coding("topk@0.02", numel))
        Collectives(world).all_gather_sum(torch.ones(numel), wire=encoded, bucket=7).wait()

    with late.open_worlds(2) as (members, _):
        stream.start(0)
        try:
            loopback.run(members, body)
        finally:
            events = stream.stop()
    encodes = [event for event in events if event.what == "encode"]
    assert [(e.bucket, e.nbytes, e.lane) for e in encodes] == [(7, 4 * numel, "compute")] * 2
    gathers = [event for event in events if event.what == "all_gather"]
    assert min(e.end_ns for e in encodes) <= min(e.begin_ns for e in gathers)
