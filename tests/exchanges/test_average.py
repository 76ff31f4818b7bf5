"""P-Reduce over groups' links: means, kept connections, members that are lost or never come."""

from __future__ import annotations

import threading
import time
from random import Random

import pytest
import torch

from wingbeat.exchanges import average
from wingbeat.exchanges.average import GroupAverage
from wingbeat.groups.averages import GIVEN_UP, Coming
from wingbeat.groups.generator import Run
from wingbeat.groups.rooms import Rooms
from wingbeat.transport import failures, loopback
from wingbeat.transport.world import World

NUMEL = 1001


@pytest.fixture(autouse=True)
def _quick_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody here says later than at once that it was waiting, too."""
    monkeypatch.setattr(failures, "ANSWER_TIMEOUT_S", 0.2)


def alive() -> Coming:
    return Coming.MAYBE


def filled(value: float) -> torch.Tensor:
    return torch.full((NUMEL,), value)


def run(number: int, *members: int) -> Run:
    return Run(number, 0, members, members[0])


def test_members_have_the_mean_and_nobody_else_has() -> None:
    def body(world: World) -> float:
        buffer = filled(float(world.rank))
        averages = GroupAverage(world, buffer)
        if world.rank != 1:
            assert averages.average(run(0, 3, 0, 2), 1, alive) is None
        averages.close()
        assert (buffer == buffer[0]).all()
        return float(buffer[0])

    assert (
        loopback.run(loopback.worlds(4), body)
        == [pytest.approx(5 / 3), 1.0] + [pytest.approx(5 / 3)] * 2
    )


@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_members_have_the_same_bits_and_the_mean_stays(wire: torch.dtype | None) -> None:
    def body(world: World) -> torch.Tensor:
        buffer = torch.randn(NUMEL, generator=torch.Generator().manual_seed(world.rank))
        averages = GroupAverage(world, buffer, wire)
        for number in range(3):
            averages.average(run(number, 0, 1, 2), 1, alive)
        assert averages.kept == 1
        averages.close()
        assert averages.kept == 0
        return buffer

    first, *others = loopback.run(loopback.worlds(3), body)
    wanted = sum(torch.randn(NUMEL, generator=torch.Generator().manual_seed(r)) for r in range(3))
    assert all(torch.equal(first, other) for other in others)
    assert torch.allclose(first, wanted / 3, atol=0.05)
    assert torch.allclose(first, wanted / 3, atol=1e-5) == (wire is None), "bf16 rounds"


def test_a_member_that_is_lost_is_named_and_the_buffer_is_as_it_was() -> None:
    board = loopback.Switchboard()

    def body(world: World) -> tuple[int | None, float, float] | None:
        buffer = filled(float(world.rank))
        averages = GroupAverage(world, buffer)
        averages.average(run(0, 0, 1, 2), 1, alive)
        buffer.fill_(float(world.rank))
        if world.rank == 2:
            board.fail(2)
            return None
        lost = averages.average(run(1, 0, 1, 2), 1, alive)
        before = float(buffer.sum())
        assert averages.kept == 0
        assert averages.average(run(1, 0, 1), 2, alive) is None
        averages.close()
        return lost, before / NUMEL, float(buffer[0])

    found = loopback.run(loopback.worlds_on(board, 3), body)
    assert found == [(2, 0.0, 0.5), (2, 1.0, 0.5), None]


@pytest.mark.parametrize("gone", [Coming.PAST, Coming.NEVER])
@pytest.mark.parametrize("kept", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_group_that_does_not_come_is_given_up_when_the_generator_is_dead(
    monkeypatch: pytest.MonkeyPatch, kept: bool, gone: Coming
) -> None:
    monkeypatch.setattr(average, "GRACE_S", 0.1 if gone is Coming.PAST else 1000.0)

    def body(world: World) -> float:
        buffer = filled(float(world.rank))
        averages = GroupAverage(world, buffer)
        if kept:
            averages.average(run(0, 0, 1), 1, alive)
        if world.rank == 0:
            begun = time.monotonic()
            answers = iter([Coming.MAYBE])
            assert averages.average(run(1, 0, 1), 1, lambda: next(answers, gone)) == GIVEN_UP
            assert time.monotonic() < begun + 10
            assert (buffer == (0.5 if kept else 0.0)).all()
            assert next(answers, None) is None
        averages.average(run(2, 1, 0), 2, alive)
        averages.close()
        return float(buffer[0])

    assert loopback.run(loopback.worlds(2), body) == [0.5, 0.5]


def meetings(workers: int, number: int, capacity: int) -> list[list[tuple[Run, int, list[int]]]]:
    """Random groups, for each worker in their order: with their meetings and those to close."""
    chance, rooms = Random(3), Rooms(workers, capacity)
    out: list[list[tuple[Run, int, list[int]]]] = [[] for _ in range(workers)]
    for each in range(number):
        members = chance.sample(range(workers), chance.choice((2, 3)))
        meeting = rooms.meeting(members)
        for member in members:
            out[member].append((run(each, *members), meeting, rooms.closed(member)))
    return out


def average_all(workers: int, number: int, capacity: int) -> None:
    planned = meetings(workers, number, capacity)
    threads: list[int] = []

    def body(world: World) -> float:
        buffer = filled(float(world.rank))
        averages = GroupAverage(world, buffer)
        for each, meeting, close in planned[world.rank]:
            averages.close(close)
            assert averages.average(each, meeting, alive) is None
            assert averages.kept <= capacity
            threads.append(threading.active_count())
        averages.close()
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
def test_twenty_thousand_random_groups() -> None:
    average_all(8, 20_000, capacity=16)
