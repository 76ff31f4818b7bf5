"""The ranks of a replica make the same averages, or none of them does."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from helpers.columns import columns
from wingbeat.errors import PeerError, UsageError
from wingbeat.methods.model_averaging.client import Client
from wingbeat.methods.model_averaging.followers import (
    MESSAGES,
    Call,
    Follower,
    Leader,
    Raised,
)
from wingbeat.methods.model_averaging.generator import Run
from wingbeat.methods.model_averaging.group_all_reduce import GracePeriod
from wingbeat.methods.model_averaging.group_averager import GroupSession
from wingbeat.methods.model_averaging.rules import Rules
from wingbeat.methods.model_averaging.static_client import ABANDONED, NO_INITIATOR, Arrival
from wingbeat.schema import MalformedMessage
from wingbeat.transport import loopback
from wingbeat.transport.world import World

# -- random histories, with columns of which each may fail by itself ------------------------------


class FakeChannel:
    """A `Channel` of threads, over queues: one for each direction of each pair."""

    def __init__(self, rank: int, size: int, boxes: list[queue.Queue[Any]]) -> None:
        self.rank, self.leader, self.timeout, self.error = rank, 0, 20.0, None
        self.replica = 9
        self.peers = tuple(range(1, size)) if rank == 0 else (0,)
        self._boxes, self._front = boxes, []

    def tell(self, message: Any) -> None:
        for peer in self.peers:
            self._boxes[peer].put((self.rank, message))

    def tell_error(self, error: BaseException) -> None:
        self.tell(Raised(str(error).encode()))

    def next(self, seconds: float) -> tuple[int, Any] | None:
        if self._front:
            return self._front.pop()
        try:
            found = self._boxes[self.rank].get(timeout=max(seconds, 1e-3))
        except queue.Empty:
            return None
        if isinstance(found[1], Raised):
            self.error = PeerError(bytes(found[1].error).decode())
            raise self.error
        return found

    def peek(self) -> Any:
        if not self._front and (found := self.next(0.0)) is not None:
            self._front.append(found)
        return self._front[0][1] if self._front else None

    def violation(self, peer: int, what: str) -> PeerError:
        return PeerError(f"rank {peer}: {what}")


class FakeColumn:
    """A column whose averages end as planned: None, a lost member, or only when given up."""

    def __init__(self, plan: list[Any]) -> None:
        self.plan, self.at = plan, -1
        self.done: list[Any] = []
        self.causes: list[tuple[int, int]] = []
        self.closed: list[Any] = []

    def attempt(self, run: Run, connection: int, arrival: Callable[[], Arrival]) -> int | None:
        self.at += 1
        planned, seconds = self.plan[self.at]
        until, grace = time.monotonic() + seconds, self.grace_period()
        while planned == "stuck" or time.monotonic() < until:
            if not grace.lasts(arrival()):
                return ABANDONED
            time.sleep(1e-3)
        return planned

    def apply(self) -> None:
        self.done.append(self.at)

    def publish_cause(self, connection: int, member: int) -> None:
        self.causes.append((connection, member))

    def grace_period(self) -> GracePeriod:
        return GracePeriod(0.05)

    def close(self, connections: Any = None) -> None:
        self.closed += [None] if connections is None else connections


class Averages:
    """A client that makes averages and nothing else; notes what became of each."""

    fallback, excluded, must_fetch, stale, lost_peers = None, False, True, True, {3}

    def __init__(self, count: int, departed: set[int]) -> None:
        self.count, self.departed, self.found = count, departed, []

    def step(self, reducer: Leader) -> None:
        for number in range(self.count):

            def arrival(number: int = number) -> Arrival:
                return Arrival.DEPARTED if number in self.departed else Arrival.POSSIBLE

            run = Run(number, 0, (0, 1, 2), NO_INITIATOR)
            self.found.append(reducer.average(run, number, arrival))


def random_plans(random_: random.Random, size: int, count: int) -> tuple[Any, set[int]]:
    """What becomes of each average in each column, and which averages lack a departed member."""
    plans: list[list[Any]] = [[] for _ in range(size)]
    departed = set()
    for number in range(count):
        kind = random_.choice(["good", "good", "one column", "two columns", "departed"])
        for plan in plans:
            plan.append((None, random_.choice([0.0, 0.0, 0.003])))
        if kind == "departed":
            departed.add(number)
            plans[random_.randrange(size)][number] = ("stuck", 0.0)
        elif kind != "good":
            for plan in plans:  # the lost member may never arrive in other columns
                if random_.random() < 0.5:
                    plan[number] = ("stuck", 0.0)
            for plan in random_.sample(plans, 1 if kind == "one column" else 2):
                plan[number] = (random_.choice([1, 2]), random_.choice([0.0, 0.003]))
    return plans, departed


def run_together(plans: Any, departed: set[int]) -> tuple[Averages, list[FakeColumn]]:
    """Let a leader and its followers make all averages; what the client and the columns saw."""
    size = len(plans)
    boxes: list[queue.Queue[Any]] = [queue.Queue() for _ in plans]
    fakes = [FakeColumn(plan) for plan in plans]
    channels: list[Any] = [FakeChannel(rank, size, boxes) for rank in range(size)]
    client: Any = Averages(len(plans[0]), departed)

    def lead() -> None:
        leader = Leader(channels[0], fakes[0])
        with leader.call(Call.STEP, client):
            client.step(leader)

    followers = [Follower(channels[rank], fakes[rank]) for rank in range(1, size)]
    threads = [threading.Thread(target=lead, daemon=True)]
    threads += [threading.Thread(target=f.step, args=(None,), daemon=True) for f in followers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
        assert not thread.is_alive(), "a rank waits for ever"
    assert all(
        f.must_fetch and f.stale and f.lost_peers == {3} and f.fallback is None for f in followers
    )
    return client, fakes


@pytest.mark.parametrize("seed", range(12))
def test_all_ranks_replace_their_buffers_or_none(seed: int) -> None:
    random_ = random.Random(seed)
    plans, departed = random_plans(random_, random_.choice([2, 3, 4]), 12)
    client, fakes = run_together(plans, departed)
    for number, result in enumerate(client.found):
        planned = {plan[number][0] for plan in plans}
        assert (result is None) == (planned == {None})
        assert (result == ABANDONED) == (number in departed)
        lost = result is not None and result != ABANDONED
        assert not lost or result in planned
        for fake in fakes:
            assert (number in fake.done) == (result is None)
            assert (number in fake.closed) == (result is not None)
            assert not lost or (number, result) in fake.causes


@pytest.mark.parametrize("first", [0, 1])
def test_member_lost_in_one_column_is_the_cause_before_the_replica_itself(first: int) -> None:
    plans = [[(1, 0.0)], [(1, 0.0)]]
    plans[first] = [(FakeChannel(0, 2, []).replica, 0.0)]
    client, fakes = run_together(plans, set())
    assert client.found == [1]
    assert all((0, 1) in fake.causes for fake in fakes)


@pytest.mark.parametrize("losing", [0, 1, 2])
def test_state_that_one_rank_did_not_receive_is_received_by_none(losing: int) -> None:
    boxes: list[queue.Queue[Any]] = [queue.Queue() for _ in range(3)]
    channels: list[Any] = [FakeChannel(rank, 3, boxes) for rank in range(3)]
    column: Any = FakeColumn([])
    client: Any = Averages(0, set())
    asked: list[tuple[int, int]] = []

    def receive(rank: int, sender: int, active: Callable[[], bool]) -> bytes | None:
        asked.append((rank, sender))
        while sender == 1 and rank == 2 != losing and active():
            time.sleep(1e-3)  # the sender sends nothing in this column
        return None if (rank, sender) == (losing, 1) else bytes([rank, sender])

    def follow(rank: int, found: dict[int, Any]) -> None:
        follower = Follower(channels[rank], column)
        found[rank] = follower.fetch_state(lambda s, _, active: receive(rank, s, active))

    found: dict[int, Any] = {}
    threads = [threading.Thread(target=follow, args=(r, found), daemon=True) for r in (1, 2)]
    for thread in threads:
        thread.start()
    leader = Leader(channels[0], column)
    with leader.call(Call.FETCH, client):
        states = [
            leader.receive(lambda s, _, active: receive(0, s, active), sender, 7, lambda: True)
            for sender in (1, 2)
        ]
    for thread in threads:
        thread.join(20.0)
    assert states == [None, bytes([0, 2])]
    assert found == {1: bytes([1, 2]), 2: bytes([2, 2])}
    assert sorted(asked) == [(rank, sender) for rank in range(3) for sender in (1, 2)]


# -- sessions of replicas of several ranks --------------------------------------------------------


@pytest.mark.parametrize("rules", [None, Rules(), Rules.all_workers()], ids=str)
def test_columns_are_averaged_alike_without_a_client_of_their_own(rules: Rules | None) -> None:
    def body(world: World) -> list[Any]:
        buffer = torch.full((50,), float(world.ranks[world.rank]))
        session = GroupSession(world, buffer, rules, seed=1)
        made = []
        attempt = session.reducer.attempt
        session.reducer.attempt = lambda run, *rest: made.append(run.members) or attempt(run, *rest)
        for _ in range(3 if rules is None else 3 + 2 * world.rank):
            session.step()
        session.synchronize()
        session.close()
        return [made, buffer.tolist()]

    found = loopback.run(columns(3, 2), body)
    for leader, follower in zip(found[::2], found[1::2], strict=True):
        assert leader[0] == follower[0] != []
    assert found[0][1] == found[2][1] == found[4][1] == pytest.approx([2.0] * 50)
    assert found[1][1] == found[3][1] == found[5][1] == pytest.approx([3.0] * 50)


def test_lost_rank_ends_its_replica_with_its_name_and_no_other() -> None:
    ended = threading.Event()

    def body(world: World) -> str:
        rank = world.ranks[world.rank]
        session = GroupSession(world, torch.full((8,), float(rank)), Rules.all_workers())
        session.step()
        try:
            if rank == 5:  # its process is killed
                assert session._channel is not None
                session._channel.close(quick=True)
                return ""
            if rank == 4:
                begun = time.monotonic()
                with pytest.raises(PeerError) as error:
                    session.step()
                assert time.monotonic() - begun < 10.0
                ended.set()
                assert isinstance(session.client, Client)
                session.client.mailbox.abandon()
                return str(error.value)
            if rank < 2:  # a slow replica, for which the others wait
                assert ended.wait(15.0), "the rank waits for the slow replica"
            for _ in range(3):
                session.step()
        finally:
            if rank < 4:
                session.close()
        return ""

    found = loopback.run(columns(3, 2), body)
    assert found[:4] == [""] * 4
    assert found[4].startswith("rank 4: rank 5, which holds the same replica of the model, has ")


def test_dead_leader_ends_its_followers_in_seconds() -> None:
    def body(world: World) -> str:
        rank = world.ranks[world.rank]
        session = GroupSession(world, torch.zeros(8), None)
        assert session._channel is not None
        if rank == 0:
            session._channel.close(quick=True)
            return ""
        if rank == 1:
            begun = time.monotonic()
            with pytest.raises(PeerError) as error:
                session.step()
            assert time.monotonic() - begun < 10.0
            return str(error.value)
        session._channel.close(quick=True)
        return ""

    found = loopback.run(columns(2, 2), body)
    assert found[1].startswith("rank 1: rank 0, which holds the same replica of the model, has ")


def test_different_calls_of_ranks_of_one_replica_are_refused() -> None:
    def body(world: World) -> str:
        session = GroupSession(world, torch.zeros(8), Rules.all_workers())
        wrong = world.ranks[world.rank] == 3
        try:
            session.synchronize() if wrong else session.step()
        except (UsageError, PeerError) as error:
            for call in (session.step, session.synchronize):
                with pytest.raises(PeerError, match=r"an earlier call .* failed \((Usage|Peer)Err"):
                    call()
            return str(error)
        finally:
            session.close()
        return ""

    found = loopback.run(columns(2, 2, timeout=5.0), body)
    assert found[3].startswith(
        "rank 3 is in wingbeat.synchronize(), and rank 2, which holds the same replica of the "
        "model, in a step: all ranks of a replica must make the same calls"
    )
    assert "rank 2: rank 3, which holds the same replica of the model, failed: " in found[2]


def test_leader_without_a_generator_tells_its_followers_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def connect(self: GroupSession, *_: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(GroupSession, "_generators_client", connect)

    def body(world: World) -> str:
        begun = time.monotonic()
        with pytest.raises((OSError, PeerError)) as error:
            GroupSession(world, torch.zeros(8), Rules()).step()
        assert time.monotonic() - begun < 10.0
        return str(error.value)

    found = loopback.run(columns(2, 2), body)
    assert found[0] == found[2] == "no more processes"
    assert all("failed: OSError: no more processes" in found[rank] for rank in (1, 3))


def test_state_of_another_replica_comes_from_the_same_column() -> None:
    back = threading.Event()

    def body(world: World) -> list[Any]:
        rank = world.ranks[world.rank]
        buffer = torch.full((4,), float(rank))
        session = GroupSession(world, buffer, Rules.all_workers())
        session.snapshot = lambda: bytes([rank])
        session.step()
        got: list[Any] = []
        if world.rank == 1:
            got = list(session.fetch_state())
            if rank == 3:
                back.set()
        while not back.is_set() and world.rank == 0:
            session.step()  # alone, until the other has its state
            time.sleep(0.01)
        session.close()
        return got

    found = loopback.run(columns(2, 2), body)
    assert found == [[], [], [0], [1]]


def test_malformed_message_of_a_rank_is_refused() -> None:
    class Wrong:
        kind, ids, payload = 2, (1, 2, 7, 7), b""

    with pytest.raises(MalformedMessage):
        MESSAGES.parse(Wrong(), workers=2)
