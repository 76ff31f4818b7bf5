"""The group generator of a job, from start to end, with workers that are threads."""

from __future__ import annotations

import functools
import threading
import time

import pytest
import torch

from helpers.returning import again, dies
from wingbeat.errors import PeerError, UsageError
from wingbeat.methods.model_averaging import group_averager
from wingbeat.methods.model_averaging.group_averager import GroupSession, receive_state
from wingbeat.methods.model_averaging.rules import Rules
from wingbeat.methods.model_averaging.service import GeneratorConfig
from wingbeat.transport import loopback
from wingbeat.transport.world import World
from wingbeat.types import Group


def services() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "wingbeat-service"]


@pytest.mark.parametrize("rules", [Rules(), Rules.random(2)], ids=["smart", "random"])
def test_parameters_are_averaged_and_the_generator_ends_with_the_job(rules: Rules) -> None:
    def body(world: World) -> float:
        buffer = torch.full((100,), float(world.rank))
        session = GroupSession(world, buffer, rules, seed=1)
        for _ in range(20):
            session.step()
        assert session.client.fallback is None
        session.close()
        return float(buffer[0])

    found = loopback.run(loopback.worlds(3), body)
    assert sum(found) == pytest.approx(3.0, rel=1e-4)
    assert max(found) - min(found) < 1.5
    deadline = time.monotonic() + 10
    while services():
        assert time.monotonic() < deadline, "the generator goes on"
        time.sleep(0.01)


def test_generator_that_cannot_start_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError("no memory")

    monkeypatch.setattr(group_averager, "ThreadService", fails)

    def body(world: World) -> None:
        with pytest.raises(UsageError, match="rank 0: cannot start the group generator: no memory"):
            GroupSession(world, torch.zeros(4), Rules())

    loopback.run(loopback.worlds(1), body)


@pytest.mark.parametrize("rules", [None, Rules(), Rules.all_workers()], ids=str)
def test_synchronize_makes_all_buffers_equal(rules: Rules | None) -> None:
    before = services()

    def body(world: World) -> tuple[float, bool]:
        buffer = torch.full((100,), float(world.rank))
        session = GroupSession(world, buffer, rules, seed=1)
        for _ in range(3 + 2 * world.rank if rules else 4):
            session.step()
        session.synchronize()
        found = float(buffer[0])
        session.step()
        session.synchronize()
        alike = bool((buffer == buffer[0]).all()) and float(buffer[0]) == found
        if rules is None:
            assert services() == before, "nobody is asked"
        session.close()
        return found, alike

    found = loopback.run(loopback.worlds(3), body)
    assert len({value for value, _ in found}) == 1
    assert found[0][0] == pytest.approx(1.0, rel=1e-4)


# -- coming back ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rules", [Rules(), Rules.all_workers()], ids=str)
def test_restarted_worker_rejoins_with_the_state_of_a_peer(rules: Rules) -> None:
    back = threading.Event()

    def train(session: GroupSession, buffer: torch.Tensor) -> None:
        left = 10
        while left:
            left -= back.is_set()
            buffer += 1.0
            session.step()
        session.synchronize()
        session.close()

    def body(world: World) -> tuple[float, ...]:
        buffer = torch.full((100,), float(world.rank))
        session = GroupSession(world, buffer, rules, seed=1)
        session.snapshot = lambda: buffer.numpy().tobytes() + bytes([world.rank])
        if world.rank != 2:
            train(session, buffer)
            return (float(buffer[0]),)
        for _ in range(5):
            session.step()
        dies(session)
        buffer = torch.zeros(100)
        session = GroupSession(again(world), buffer, rules, seed=1)
        state = session.fetch_state()
        buffer.copy_(torch.frombuffer(state[:400], dtype=torch.float32))
        taken, giver = float(buffer[0]), state[400]
        # Each part of a sum of three was added in an order of its own.
        torch.testing.assert_close(buffer, torch.full((100,), taken))
        assert len(state) == 401
        back.set()
        train(session, buffer)
        return float(buffer[0]), taken, giver

    one, other, (value, taken, giver) = loopback.run(loopback.worlds(3), body)
    assert one == other == (value,)
    assert giver in (0, 1)
    assert taken > 0
    assert value > 0  # below what was taken, if the giver was ahead of the other


def generator_events(caplog: pytest.LogCaptureFixture, rank: int) -> list[str]:
    """Return the events about generators that a rank has logged."""
    own = [vars(each)["event"] for each in caplog.records if getattr(each, "rank", None) == rank]
    return [event for event in own if event.startswith("generator-")]


@pytest.mark.parametrize("rules", [Rules(), Rules.all_workers()], ids=["smart", "everyone"])
@pytest.mark.parametrize("host", [0, 1])
def test_generator_that_ends_is_started_again_and_a_worker_rejoins(
    rules: Rules, host: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker that has started it ends too, or continues; a second one ends later."""
    # A worker that the generator has excluded as late before it ends is lost to the others.
    monkeypatch.setattr(
        group_averager, "GeneratorConfig", functools.partial(GeneratorConfig, least=60.0)
    )
    back = threading.Event()
    sessions: dict[int, GroupSession] = {}

    def train(world: World, session: GroupSession, buffer: torch.Tensor) -> float:
        left = 10
        while left:
            left -= back.is_set()
            buffer += 1.0
            session.step()
        session.synchronize()
        assert session.client.fallback is None
        session.close()
        return float(buffer[0])

    def made(world: World, buffer: torch.Tensor) -> GroupSession:
        session = GroupSession(world, buffer, rules, seed=1)
        session.snapshot = lambda: buffer.numpy().tobytes()
        return session

    def body(world: World) -> float:
        buffer = torch.full((100,), float(world.rank))
        session = sessions[world.rank] = made(world, buffer)
        victim = 0 if host == 0 else 2
        if world.rank != victim:
            return train(world, session, buffer)
        for _ in range(5):
            session.step()
        assert sessions[0]._service is not None
        sessions[0]._service.kill()
        if host != 0:  # the generator first, and the worker once there is another one
            while session.client.fallback is None:
                session.step()
            while session.client.fallback is not None:
                session.step()
        dies(session)
        buffer = torch.zeros(100)
        session = made(again(world), buffer)
        buffer.copy_(torch.frombuffer(session.fetch_state(), dtype=torch.float32))
        assert float(buffer[0]) > 0
        back.set()
        return train(world, session, buffer)

    values = loopback.run(loopback.worlds(3), body)
    assert len(set(values)) == 1, values
    found = ["generator-lost", "generator-started"]
    assert generator_events(caplog, 1)[:2] == generator_events(caplog, 2)[:2] == found


def test_fetch_state_without_or_with_too_large_state_raises() -> None:
    def body(world: World) -> None:
        session = GroupSession(world, torch.zeros(4), Rules())
        if world.rank == 0:
            session.snapshot = lambda: bytes(1000)
            for _ in range(2):
                session.step()
            session.synchronize()
            session.snapshot = None
            session.step()
            session.synchronize()
        else:
            session._limit = 999
            with pytest.raises(PeerError, match="rank 1: rank 0 sends a state of 1000 bytes"):
                session.fetch_state()
            session._limit = 1000
            assert session.fetch_state() == bytes(1000)
            for _ in range(2):
                session.step()
            session.synchronize()
            with pytest.raises(PeerError, match="rank 1: rank 0 has no training state"):
                session.fetch_state()
            session.step()
            session.synchronize()
        session.close()

    loopback.run(loopback.worlds(2), body)


def test_fetch_state_without_active_peer_raises() -> None:
    def body(world: World) -> None:
        session = GroupSession(world, torch.zeros(4), Rules())
        with pytest.raises(PeerError, match=r"rank 0: cannot find a peer .*: no other"):
            session.fetch_state()
        session.close()

    loopback.run(loopback.worlds(1), body)


def test_rejoin_to_the_static_schedule_raises() -> None:
    def body(world: World) -> None:
        session = GroupSession(world, torch.zeros(4), None)
        with pytest.raises(UsageError, match=r"fetch_state\(\): the static schedule has no rejoin"):
            session.fetch_state()
        with pytest.raises(UsageError, match=r"rank 0 was started again .* the static schedule"):
            GroupSession(again(world), torch.zeros(4), None)

    loopback.run(loopback.worlds(1), body)


def test_fetch_state_asks_another_peer_when_the_sender_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost: list[int] = []
    usual = group_averager._send_state

    def breaks(inner: World, state: bytes | None) -> None:
        if not lost:
            lost.append(inner.ranks[inner.rank])
            inner.links[0].send(torch.tensor([1]), 1 - inner.rank, 0).wait(10.0)
            for link in inner.links:
                link.close()
        else:
            usual(inner, state)

    monkeypatch.setattr(group_averager, "_send_state", breaks)

    def body(world: World) -> int:
        session = GroupSession(world, torch.zeros(4), Rules())
        session.snapshot = lambda: bytes([world.rank])
        giver = session.fetch_state()[0] if world.rank == 2 else -1
        session.synchronize()
        session.close()
        return giver

    *_, giver = loopback.run(loopback.worlds(3), body)
    assert giver == 1 - lost[0]


def test_failing_receiver_of_a_state_leaves_no_thread_and_no_group() -> None:
    """Another rank of the replica is lost meanwhile, or the generator sends what is malformed."""
    over = threading.Event()

    def body(world: World) -> bool:
        if world.rank == 1:
            with world.open_group(Group((0, 1), epoch=3)):
                assert over.wait(15.0)
            return True

        def is_active() -> bool:
            raise PeerError("rank 0: rank 4, which holds the same replica")

        with pytest.raises(PeerError, match="rank 4"):
            receive_state(world, 1, 3, 100, is_active)
        alive = [each for each in threading.enumerate() if each.name == "wingbeat-receive-state"]
        over.set()
        return not alive

    assert loopback.run(loopback.worlds(2), body) == [True, True]
