"""P-Reduce over groups' links: means, open connections, lost and missing members."""

from __future__ import annotations

import threading
import time
from random import Random
from typing import Any

import pytest
import torch

from helpers.columns import columns
from wingbeat.codecs import Coding
from wingbeat.codecs.codec import Codec, SketchCodec
from wingbeat.codecs.coding import Region
from wingbeat.codecs.topk import TopKCodec
from wingbeat.collectives import Collectives
from wingbeat.methods.model_averaging import group_all_reduce
from wingbeat.methods.model_averaging.generator import Run
from wingbeat.methods.model_averaging.group_all_reduce import GroupAllReduce, ModelCompression
from wingbeat.methods.model_averaging.service import ConnectionCache
from wingbeat.methods.model_averaging.static_client import ABANDONED, Arrival
from wingbeat.transport import failures, loopback
from wingbeat.transport.world import World
from wingbeat.types import Span

NUMEL = 1001


@pytest.fixture(autouse=True)
def _quick_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody here says later than at once that it was waiting, too."""
    monkeypatch.setattr(failures, "ANSWER_TIMEOUT_S", 0.2)


def alive() -> Arrival:
    return Arrival.POSSIBLE


def filled(value: float) -> torch.Tensor:
    return torch.full((NUMEL,), value)


def run(number: int, *members: int) -> Run:
    return Run(number, 0, members, members[0])


def test_average_gives_members_the_mean_and_leaves_others_unchanged() -> None:
    def body(world: World) -> float:
        buffer = filled(float(world.rank))
        reducer = GroupAllReduce(world, buffer)
        if world.rank != 1:
            assert reducer.average(run(0, 3, 0, 2), 1, alive) is None
        reducer.close()
        assert (buffer == buffer[0]).all()
        return float(buffer[0])

    assert (
        loopback.run(loopback.worlds(4), body)
        == [pytest.approx(5 / 3), 1.0] + [pytest.approx(5 / 3)] * 2
    )


@pytest.mark.parametrize("codec", [None, TopKCodec(0.1), SketchCodec(8)], ids=str)
def test_empty_part_of_a_column_has_its_average_at_once(codec: Codec | None) -> None:
    """The other rank of the group never calls; the part before it is not empty."""
    world = loopback.worlds(2)[0]
    coding = None if codec is None else Coding([Region(Span(0, NUMEL), codec)])
    buffer = filled(2.0)
    reducer = GroupAllReduce(
        world, buffer, ModelCompression(coding, gathers=isinstance(codec, TopKCodec))
    )
    reducer.part = Span(7, 7)
    assert reducer.average(run(0, 0, 1), 1, alive) is None
    assert (reducer.members, reducer.completed) == ((0, 1), 1)
    assert torch.equal(buffer, filled(2.0))
    reducer.close()


@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_average_gives_members_equal_bits_and_keeps_the_mean(wire: torch.dtype | None) -> None:
    def body(world: World) -> torch.Tensor:
        buffer = torch.randn(NUMEL, generator=torch.Generator().manual_seed(world.rank))
        reducer = GroupAllReduce(world, buffer, ModelCompression(dtype=wire))
        for number in range(3):
            reducer.average(run(number, 0, 1, 2), 1, alive)
        assert len(reducer._open) == 1
        reducer.close()
        assert len(reducer._open) == 0
        return buffer

    first, *others = loopback.run(loopback.worlds(3), body)
    wanted = sum(torch.randn(NUMEL, generator=torch.Generator().manual_seed(r)) for r in range(3))
    assert all(torch.equal(first, other) for other in others)
    assert torch.allclose(first, wanted / 3, atol=0.05)
    assert torch.allclose(first, wanted / 3, atol=1e-5) == (wire is None), "bf16 rounds"


def test_average_returns_the_lost_member_and_leaves_the_buffer_unchanged() -> None:
    board = loopback.Switchboard()

    def body(world: World) -> tuple[int | None, float, float] | None:
        buffer = filled(float(world.rank))
        reducer = GroupAllReduce(world, buffer)
        reducer.average(run(0, 0, 1, 2), 1, alive)
        buffer.fill_(float(world.rank))
        if world.rank == 2:
            board.fail(2)
            return None
        lost = reducer.average(run(1, 0, 1, 2), 1, alive)
        before = float(buffer.sum())
        assert len(reducer._open) == 0
        assert reducer.average(run(1, 0, 1), 2, alive) is None
        reducer.close()
        return lost, before / NUMEL, float(buffer[0])

    found = loopback.run(loopback.worlds(3, switchboard=board), body)
    assert found == [(2, 0.0, 0.5), (2, 1.0, 0.5), None]


def test_average_of_a_column_returns_the_number_of_the_lost_replica() -> None:
    """Members are replicas; the second rank of replica 1 is rank 3 of the job."""
    boards = [loopback.Switchboard() for _ in range(2)]

    def body(world: World) -> int | None:
        if world.ranks[world.rank] % 2 == 0:
            return None
        reducer = GroupAllReduce(world, filled(float(world.rank)))
        reducer.average(run(0, 0, 1, 2), 1, alive)
        if world.rank == 1:
            boards[1].fail(1)
            return None
        return reducer.average(run(1, 0, 1, 2), 1, alive)

    found = loopback.run(columns(3, 2, switchboards=boards), body)
    assert found == [None, 1, None, None, None, 1]


@pytest.mark.parametrize("gone", [Arrival.DEPARTED, Arrival.IMPOSSIBLE])
@pytest.mark.parametrize("kept", [pytest.param(False, marks=pytest.mark.slow), True])
def test_average_is_abandoned_when_members_will_not_arrive(
    monkeypatch: pytest.MonkeyPatch, kept: bool, gone: Arrival
) -> None:
    monkeypatch.setattr(group_all_reduce, "GRACE_S", 0.1 if gone is Arrival.DEPARTED else 1000.0)

    def body(world: World) -> float:
        buffer = filled(float(world.rank))
        reducer = GroupAllReduce(world, buffer)
        if kept:
            reducer.average(run(0, 0, 1), 1, alive)
        if world.rank == 0:
            begun = time.monotonic()
            answers = iter([Arrival.POSSIBLE])
            assert reducer.average(run(1, 0, 1), 1, lambda: next(answers, gone)) == ABANDONED
            assert time.monotonic() < begun + 10
            assert (buffer == (0.5 if kept else 0.0)).all()
            assert next(answers, None) is None
        reducer.average(run(2, 1, 0), 2, alive)
        reducer.close()
        return float(buffer[0])

    assert loopback.run(loopback.worlds(2), body) == [0.5, 0.5]


def test_abandoned_average_that_still_writes_does_not_change_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A half-arrived transfer may end at its deadline only; it may write until then."""
    totals: list[torch.Tensor] = []
    start = GroupAllReduce._start

    def record(reducer: GroupAllReduce, collectives: Collectives, total: torch.Tensor) -> Any:
        if collectives.world.ranks[collectives.world.rank] == 0:
            for earlier in totals:
                earlier.fill_(99.0)
            totals.append(total)
        return start(reducer, collectives, total)

    monkeypatch.setattr(GroupAllReduce, "_start", record)

    def body(world: World) -> float:
        buffer = filled(float(world.rank))
        reducer = GroupAllReduce(world, buffer)
        reducer.average(run(0, 0, 1), 1, alive)
        if world.rank == 0:
            totals.clear()  # the first average is complete
            answers = iter([Arrival.POSSIBLE])
            arrival = lambda: next(answers, Arrival.IMPOSSIBLE)  # noqa: E731
            assert reducer.average(run(1, 0, 1), 1, arrival) == ABANDONED
        reducer.average(run(2, 1, 0), 2, alive)
        reducer.close()
        return float(buffer[0])

    assert loopback.run(loopback.worlds(2), body) == [0.5, 0.5]


def connections_of(
    workers: int, number: int, capacity: int
) -> list[list[tuple[Run, int, list[int]]]]:
    """Random groups, for each worker in their order: with their meetings and those to close."""
    chance, cache = Random(3), ConnectionCache(workers, capacity)
    out: list[list[tuple[Run, int, list[int]]]] = [[] for _ in range(workers)]
    for each in range(number):
        members = chance.sample(range(workers), chance.choice((2, 3)))
        connection = cache.id_of(members)
        for member in members:
            out[member].append((run(each, *members), connection, cache.pop_closed(member)))
    return out


def average_all(workers: int, number: int, capacity: int) -> None:
    planned = connections_of(workers, number, capacity)
    threads: list[int] = []

    def body(world: World) -> float:
        buffer = filled(float(world.rank))
        reducer = GroupAllReduce(world, buffer)
        for each, connection, close in planned[world.rank]:
            reducer.close(close)
            assert reducer.average(each, connection, alive) is None
            assert len(reducer._open) <= capacity
            threads.append(threading.active_count())
        reducer.close()
        return float(buffer[0])

    found = loopback.run(loopback.worlds(workers), body)
    assert sum(found) == pytest.approx(sum(range(workers)), rel=1e-3)
    assert max(found) - min(found) < 0.5
    quarter = len(threads) // 4
    assert max(threads[-quarter:]) <= max(threads[:quarter]) + workers


def test_random_groups_keep_few_connections_and_threads() -> None:
    average_all(5, 300, capacity=3)  # each worker opens more than may be open at once


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_thousand_random_groups_keep_few_connections() -> None:
    average_all(8, 20_000, capacity=16)
