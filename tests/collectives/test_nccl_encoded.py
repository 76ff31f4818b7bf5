"""The path that GPUs take with codecs, on CPUs: ranks are threads, and a group that copies."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from wingbeat import compression
from wingbeat.codecs import Coding, make
from wingbeat.codecs.codec import Dense
from wingbeat.codecs.coding import Region
from wingbeat.codecs.lowrank import Factors, Matrix
from wingbeat.collectives import Collectives, Encoded
from wingbeat.errors import PeerError
from wingbeat.transport import loopback
from wingbeat.transport.world import World
from wingbeat.types import Span

SIZE = 3
NUMEL = 3 * 2000


class Copied:
    def wait(self) -> None:
        """All is done when the call returns, as on a stream."""


class Group:
    """One rank's part of a library that moves bytes; ``rows`` has what each rank has given."""

    def __init__(self, rank: int, rows: list[torch.Tensor], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, SIZE
        self._rows, self._barrier = rows, barrier

    def _exchange(self, given: torch.Tensor) -> list[torch.Tensor]:
        self._rows[self.rank] = given.clone()
        self._barrier.wait(20)
        found = list(self._rows)
        self._barrier.wait(20)
        return found

    def all_to_all(self, into: torch.Tensor, buffer: torch.Tensor) -> Copied:
        all_rows = self._exchange(buffer)
        into.copy_(torch.cat([row.chunk(SIZE)[self.rank] for row in all_rows]))
        return Copied()

    def all_gather(self, buffer: torch.Tensor) -> Copied:
        mine = buffer.chunk(SIZE)[self.rank]
        buffer.copy_(torch.cat(self._exchange(mine)))
        return Copied()

    def all_reduce(self, buffer: torch.Tensor) -> Copied:
        assert buffer.numel() % SIZE == 0
        buffer.copy_(torch.stack(self._exchange(buffer)).sum(0))
        return Copied()


@contextmanager
def native_worlds() -> Iterator[list[World]]:
    members = loopback.worlds(SIZE)
    rows, barrier = [torch.empty(0)] * SIZE, threading.Barrier(SIZE)
    for world in members:
        group: Any = Group(world.rank, rows, barrier)
        world.make_nccl_group = lambda _, group=group: group
        world.nccl_devices = frozenset({"cpu"})
    yield members
    for world in members:
        world.close()


def coding(wire: str) -> Coding:
    """Most of the first worker's block goes as it is, so that payloads differ in size."""
    settings = compression.parse(wire)
    assert not isinstance(settings, str)
    return Coding([Region(Span(0, 1900), Dense()), Region(Span(1900, NUMEL), make(settings))])


def values(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randn(SIZE, NUMEL, generator=generator) ** 3)


def exchange(collectives: Collectives, how: str, buffer: torch.Tensor, wire: Encoded) -> None:
    if how == "whole":
        collectives.all_reduce(buffer, wire=wire).wait()
    elif how == "halves":
        scattered = collectives.reduce_scatter(buffer, wire=wire)
        collectives.all_gather(buffer, after=scattered, wire=wire).wait()
    else:
        collectives.all_gather_sum(buffer, wire=wire).wait()


@pytest.mark.parametrize("how", ["whole", "halves", "gathered"])
@pytest.mark.parametrize("wire", ["sketch@3", "topk@0.02"])
def test_encoded_sum_is_equal_everywhere_and_residuals_hold_the_error(wire: str, how: str) -> None:
    rounds = [values(seed) for seed in range(3)]
    residuals = [torch.zeros(NUMEL) for _ in range(SIZE)]

    def body(world: World) -> list[torch.Tensor]:
        encoded = Encoded(coding(wire), residuals[world.rank])
        buffers = [each[world.rank].clone() for each in rounds]
        for buffer in buffers:
            exchange(Collectives(world), how, buffer, encoded)
        return buffers

    with native_worlds() as members:
        results = loopback.run(members, body)
    for other in results[1:]:
        assert all(map(torch.equal, other, results[0]))
    for got, put_in in zip(results[0], rounds, strict=True):
        torch.testing.assert_close(got[:1900], torch.stack(put_in).sum(0)[:1900])
    got = torch.stack(results[0]).double().sum(0) + torch.stack(residuals).double().sum(0)
    want = torch.stack([torch.stack(each) for each in rounds]).double().sum((0, 1))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert torch.stack(residuals).abs().max() > 0.1, "a lossless codec would not test it"


def test_factors_are_summed_by_the_library_in_the_order_of_the_calls() -> None:
    """A matrix of the whole buffer but for its end; what is lost is in the residuals."""
    rounds = [values(seed) for seed in range(3)]
    residuals = [torch.zeros(NUMEL) for _ in range(SIZE)]

    def body(world: World) -> list[torch.Tensor]:
        matrix = Matrix("matrix", 0, 74, 80, 3)
        factors = Factors([matrix], NUMEL, SIZE, residuals[world.rank], {})
        buffers = [each[world.rank].clone() for each in rounds]
        for buffer in buffers:
            Collectives(world).all_reduce_factors(buffer, factors).wait()
        return buffers

    with native_worlds() as members:
        results = loopback.run(members, body)
    for other in results[1:]:
        assert all(map(torch.equal, other, results[0]))
    got = torch.stack(results[0]).sum(0) + torch.stack(residuals).sum(0)
    want = torch.stack([torch.stack(each) for each in rounds]).sum((0, 1))
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    assert torch.stack(residuals)[:, : 74 * 80].abs().max() > 0.1
    assert not torch.stack(residuals)[:, 74 * 80 :].any()


@pytest.mark.parametrize("what", ["reduce_scatter", "all_gather"])
def test_malformed_payload_names_its_sender(what: str) -> None:
    def body(world: World) -> str:
        if world.rank == 1:
            group: Any = world.nccl
            usual = group._exchange
            group._exchange = lambda given: usual(torch.full_like(given, 255))
        buffer = values(0)[world.rank]
        try:
            getattr(Collectives(world), what)(buffer, wire=Encoded(coding("topk@0.02"))).wait()
        except PeerError as err:
            return str(err)
        return ""

    with native_worlds() as members:
        said = loopback.run(members, body)
    where = what.replace("_", "-")
    assert said[0].startswith(f"rank 0: {where}: rank 1 sent a malformed payload: ")
    assert said[2].startswith(f"rank 2: {where}: rank 1 sent a malformed payload: ")
