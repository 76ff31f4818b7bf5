"""A job's group generator, from start to end, with workers that are threads."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from helpers.returning import again, dies
from wingbeat.errors import PeerError, RendezvousError, UsageError
from wingbeat.exchanges import grouping, states
from wingbeat.exchanges.grouping import Grouping
from wingbeat.groups.rules import Rules
from wingbeat.transport import loopback
from wingbeat.transport.world import World


def services() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "wingbeat-service"]


@pytest.mark.parametrize("rules", [Rules(), Rules.random(2)], ids=["smart", "random"])
def test_parameters_are_averaged_and_the_generator_ends_with_the_job(rules: Rules) -> None:
    def body(world: World) -> float:
        buffer = torch.full((100,), float(world.rank))
        groups = Grouping(world, buffer, rules, seed=1)
        for _ in range(20):
            groups.step()
        assert groups.client.fallen is None
        groups.close()
        return float(buffer[0])

    found = loopback.run(loopback.worlds(3), body)
    assert sum(found) == pytest.approx(3.0, rel=1e-4)
    assert max(found) - min(found) < 1.5
    deadline = time.monotonic() + 10
    while services():
        assert time.monotonic() < deadline, "the generator goes on"
        time.sleep(0.01)


def test_a_generator_that_cannot_be_started_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError("no memory")

    monkeypatch.setattr(grouping, "ThreadService", fails)

    def body(world: World) -> None:
        with pytest.raises(UsageError, match="rank 0: cannot start the group generator: no memory"):
            Grouping(world, torch.zeros(4), Rules())

    loopback.run(loopback.worlds(1), body)


def test_a_host_that_is_no_text_is_malformed(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(world: World) -> None:
        monkeypatch.setattr(world, "read", lambda what, rank: 7)
        with pytest.raises(PeerError, match="rank 0 sent a malformed identity"):
            Grouping(world, torch.zeros(4), Rules())

    loopback.run(loopback.worlds(1), body)


@pytest.mark.parametrize("rules", [None, Rules(), Rules.everyone()], ids=str)
def test_all_buffers_are_one_after_levelling(rules: Rules | None) -> None:
    before = services()

    def body(world: World) -> tuple[float, bool]:
        buffer = torch.full((100,), float(world.rank))
        groups = Grouping(world, buffer, rules, seed=1)
        for _ in range(3 + 2 * world.rank if rules else 4):
            groups.step()
        groups.level()
        found = float(buffer[0])
        groups.step()
        groups.level()
        alike = bool((buffer == buffer[0]).all()) and float(buffer[0]) == found
        if rules is None:
            assert services() == before, "nobody is asked"
        groups.close()
        return found, alike

    found = loopback.run(loopback.worlds(3), body)
    assert len({value for value, _ in found}) == 1
    assert found[0][0] == pytest.approx(1.0, rel=1e-4)


# -- coming back ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rules", [Rules(), Rules.everyone()], ids=str)
def test_a_worker_that_died_comes_back_with_the_state_of_another(rules: Rules) -> None:
    back = threading.Event()

    def train(groups: Grouping, buffer: torch.Tensor) -> None:
        left = 10
        while left:
            left -= back.is_set()
            buffer += 1.0
            groups.step()
        groups.level()
        groups.close()

    def body(world: World) -> tuple[float, ...]:
        buffer = torch.full((100,), float(world.rank))
        groups = Grouping(world, buffer, rules, seed=1)
        groups.offer = lambda: buffer.numpy().tobytes() + bytes([world.rank])
        if world.rank != 2:
            train(groups, buffer)
            return (float(buffer[0]),)
        for _ in range(5):
            groups.step()
        dies(groups)
        buffer = torch.zeros(100)
        groups = Grouping(again(world), buffer, rules, seed=1)
        state = groups.fetch()
        buffer.copy_(torch.frombuffer(state[:400], dtype=torch.float32))
        taken, giver = float(buffer[0]), state[400]
        # Each part of a sum of three was added in an order of its own.
        torch.testing.assert_close(buffer, torch.full((100,), taken))
        assert len(state) == 401
        back.set()
        train(groups, buffer)
        return float(buffer[0]), taken, giver

    one, other, (value, taken, giver) = loopback.run(loopback.worlds(3), body)
    assert one == other == (value,)
    assert giver in (0, 1)
    assert 0 < taken <= value


def test_what_cannot_be_fetched_is_said() -> None:
    def body(world: World) -> None:
        groups = Grouping(world, torch.zeros(4), Rules())
        if world.rank == 0:
            groups.offer = lambda: bytes(1000)
            for _ in range(2):
                groups.step()
            groups.level()
            groups.offer = None
            groups.step()
            groups.level()
        else:
            with pytest.raises(PeerError, match="rank 1: rank 0 sends a state of 1000 bytes"):
                groups.fetch(most=999)
            assert groups.fetch(most=1000) == bytes(1000)
            for _ in range(2):
                groups.step()
            groups.level()
            with pytest.raises(PeerError, match="rank 1: rank 0 offers no state"):
                groups.fetch()
            groups.step()
            groups.level()
        groups.close()

    loopback.run(loopback.worlds(2), body)


def test_nobody_is_left_to_take_a_state_from() -> None:
    def body(world: World) -> None:
        groups = Grouping(world, torch.zeros(4), Rules())
        with pytest.raises(PeerError, match="rank 0: nobody takes part whose state"):
            groups.fetch()
        groups.close()

    loopback.run(loopback.worlds(1), body)


def test_nobody_comes_back_to_the_static_schedule_or_in_the_place_of_the_generators_host() -> None:
    def body(world: World) -> None:
        groups = Grouping(world, torch.zeros(4), None)
        with pytest.raises(UsageError, match=r"fetch\(\): nobody comes back to the static"):
            groups.fetch()
        with pytest.raises(UsageError, match=r"rank 0 was started again .* the static schedule"):
            Grouping(again(world), torch.zeros(4), None)
        Grouping(world, torch.zeros(4), Rules()).close()
        with pytest.raises(RendezvousError, match="rank 0: cannot come back: the group generator"):
            Grouping(again(world), torch.zeros(4), Rules())

    loopback.run(loopback.worlds(1), body)


def test_who_gives_its_state_and_is_lost_is_replaced_by_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost: list[int] = []
    usual = states._give

    def breaks(inner: World, blob: bytes | None) -> None:
        if not lost:
            lost.append(inner.ranks[inner.rank])
            inner.links[0].send(torch.tensor([1]), 1 - inner.rank, 0).wait(10.0)
            for link in inner.links:
                link.close()
        else:
            usual(inner, blob)

    monkeypatch.setattr(states, "_give", breaks)

    def body(world: World) -> int:
        groups = Grouping(world, torch.zeros(4), Rules())
        groups.offer = lambda: bytes([world.rank])
        giver = groups.fetch()[0] if world.rank == 2 else -1
        groups.level()
        groups.close()
        return giver

    *_, giver = loopback.run(loopback.worlds(3), body)
    assert giver == 1 - lost[0]
