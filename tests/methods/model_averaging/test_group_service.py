"""The service of the group generator: membership, timeouts, synchronization, rejoins."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import pytest

from helpers.mail import Clock
from helpers.received import Received
from wingbeat.errors import PeerError, UsageError
from wingbeat.methods.model_averaging import service
from wingbeat.methods.model_averaging.client import CONNECT_S
from wingbeat.methods.model_averaging.generator import (
    MESSAGES,
    Added,
    Done,
    Fetched,
    FetchState,
    Generator,
    Keepalive,
    Lost,
    Reason,
    Refused,
    Removed,
    Request,
    RunMessage,
    SendState,
    Synchronize,
)
from wingbeat.methods.model_averaging.rules import Rules
from wingbeat.methods.model_averaging.service import GeneratorConfig, GroupService
from wingbeat.transport.detector import RECONNECT_S
from wingbeat.transport.loopback import Switchboard
from wingbeat.transport.membership import MembershipChange, MembershipClient, View
from wingbeat.types import Layout

OTHER_OPTIONS = object()
"""Contact information of a mailbox with other options."""


class FakeMailbox:
    """The part of a mailbox that the service uses."""

    def __init__(self, workers: int) -> None:
        self.inbox: deque[Received] = deque()
        self.sent: list[deque[Received]] = [deque() for _ in range(workers)]
        self.left: set[int] = set()
        self.lost: dict[int, str] = {}
        self.full: set[int] = set()
        self.cut: dict[int, float] = {}
        self.closed = False
        self.peers: set[int] = set()
        self.refused: Counter[str] = Counter()

    def interrupter(self) -> Callable[[], None]:
        return lambda: None

    def poll(self, *, keep: bool = False) -> Received | None:
        return self.inbox.popleft() if self.inbox else None

    def next(self, seconds: float, *, keep: bool = False) -> Received | None:
        return self.poll()

    def post(self, peer: int, kind: int, payload: Any = b"", *, ids: Any, urgency: int,
             seconds: float) -> None:  # fmt: skip
        assert seconds == 0.0, "the generator does not block"
        if peer in self.left or peer in self.lost or peer in self.full:
            raise PeerError(f"rank {peer} is gone")
        self.sent[peer].append(Received(kind, ids, payload, peer))

    def unconnected(self) -> dict[int, float]:
        return self.cut

    def close(self, seconds: float) -> None:
        self.closed = True

    def join(self, peer: int, card: Any) -> None:
        if card is OTHER_OPTIONS:
            raise UsageError("it was opened with other limits")
        self.peers.add(peer)
        self.lost.pop(peer, None)
        self.left.discard(peer)
        self.sent[peer].clear()


class Rig:
    """A service of workers on one host, which makes groups of all idle workers, or by ``rules``."""

    def __init__(self, workers: int = 3, size: int = 3, rules: Rules | None = None) -> None:
        self.workers, self.clock, self.box = workers, Clock(), FakeMailbox(workers)
        rules = rules or Rules(size=size, inter_intra=False, threshold=None)
        self.generator = Generator(Layout.even(1, workers), rules)
        self.service = GroupService(
            self.box, self.generator, workers, 100.0, clock=self.clock, started_by=0,  # type: ignore[arg-type]
        )  # fmt: skip

    def send(self, worker: int, message: Any) -> None:
        self.box.inbox.append(Received(*MESSAGES.pack(message), peer=worker))
        self.service.step(None)
        self.service.step(self.box.poll())

    def advance(self, seconds: float) -> None:
        self.clock.now += seconds
        self.service.step(None)

    def received(self, worker: int) -> list[Any]:
        messages = list(self.box.sent[worker])
        self.box.sent[worker].clear()
        return [MESSAGES.parse(message, workers=self.workers) for message in messages]

    def runs(self, worker: int) -> list[RunMessage]:
        return [each for each in self.received(worker) if isinstance(each, RunMessage)]

    def round(self, *workers: int, seconds: float = 1.0) -> None:
        """Let these workers make a step, and average."""
        self.advance(seconds)
        for worker in workers:
            self.send(worker, Request())
        for worker in workers:
            run = self.runs(worker)[-1]
            self.send(worker, Done(run.number, run.epoch))


def restart(rig: Rig, worker: int, info: object) -> MembershipClient:
    """Have a worker return as its next incarnation."""
    client = rig.service._membership = MembershipClient(Switchboard(), "groups", 3, 4)
    client._changes += [
        MembershipChange(worker, 0, False, worker),
        MembershipChange(worker, 1, True, worker, info),  # type: ignore[arg-type]
    ]
    rig.advance(0.0)
    return client


def test_members_receive_a_run_after_the_last_request() -> None:
    rig = Rig()
    rig.send(0, Request())
    rig.send(2, Request())
    assert not any(rig.box.sent)
    rig.send(1, Request())
    told = [rig.runs(worker) for worker in range(3)]
    assert told[0] == told[1] == told[2]
    assert sorted(told[0][0].members) == [0, 1, 2]


def test_lost_worker_is_removed_and_its_group_runs_without_it() -> None:
    rig = Rig()
    rig.send(0, Request())
    rig.send(1, Request())
    rig.box.lost[2] = "has been silent"
    rig.advance(1.0)
    for worker in (0, 1):
        messages = rig.received(worker)
        assert [type(message) for message in messages] == [Removed, RunMessage]
        assert messages[0].worker == 2
        assert (messages[1].number, sorted(messages[1].members)) == (0, [0, 1])


def test_silent_worker_receives_what_it_missed_and_returns_with_a_state() -> None:
    rig = Rig()
    rig.round(0, 1, 2)
    rig.box.lost[2] = "has been silent"
    rig.advance(1.0)
    rig.round(0, 1)
    assert not rig.received(2)
    rig.box.lost.clear()
    rig.advance(1.0)
    assert [(type(message), message[0]) for message in rig.received(2)] == [
        (Added, 0),
        (Added, 1),
        (Removed, 2),
    ]
    rig.send(2, Request())
    (out,) = rig.received(2)
    assert (type(out), *out[:3]) == (Removed, 2, 2, Reason.SILENT)
    rig.send(2, FetchState(-1, join=False))
    assert [type(message) for message in rig.received(2)] == [SendState]
    rig.send(2, Fetched())
    rig.received(0)
    rig.received(1)
    rig.send(2, Request())
    assert 2 in rig.generator
    assert Removed not in [type(message) for message in rig.received(2)]


def test_service_ends_when_all_but_silent_workers_have_left() -> None:
    rig = Rig()
    rig.box.left |= {0, 1}
    rig.box.lost[2] = "has been silent"
    rig.advance(1.0)
    rig.service.run()
    assert rig.box.closed


@pytest.mark.parametrize("waits", [False, True])
def test_worker_without_connections_is_removed_before_its_timeout(waits: bool) -> None:
    """It dies while it computes, or after its request and before its group runs."""
    rig = Rig()
    for _ in range(3):
        rig.round(0, 1, 2, seconds=100.0)  # so that its deadline is far away
    for worker in (2, 0, 1) if waits else (0, 1):
        rig.send(worker, Request())
        rig.received(worker)
    rig.box.cut[2] = 0.9 * RECONNECT_S
    rig.advance(1.0)
    assert 2 in rig.generator, "it may connect again"
    rig.box.cut[2] = 1.1 * RECONNECT_S
    rig.advance(1.0)
    for worker in (0, 1):
        kinds = {type(message): message for message in rig.received(worker)}
        assert kinds[Removed].worker == 2
        run = kinds[RunMessage].run
        assert (run.epoch, sorted(run.members)) == (int(waits), [0, 1])
    rig.box.cut.clear()
    rig.send(2, Request())
    assert 2 in rig.generator, "it lives, and is active from its next request"


def test_unreachable_member_is_removed_at_once() -> None:
    rig = Rig()
    rig.send(0, Request())
    rig.send(1, Request())
    rig.box.full.add(1)
    rig.send(2, Request())
    for worker in (0, 2):
        run = rig.runs(worker)[-1]
        assert (run.epoch, sorted(run.members)) == (1, [0, 2])
    assert 1 not in rig.generator


def test_late_worker_is_excluded_after_its_timeout_and_returns() -> None:
    rig = Rig()
    for _ in range(3):
        rig.round(0, 1, 2)
    rig.advance(1.0)
    rig.send(0, Request())
    rig.send(1, Request())
    rig.advance(6.5)
    assert rig.runs(0) == []
    assert rig.received(2) == [Keepalive()], "once, to detect whether it lives"
    rig.advance(1.0)
    assert sorted(rig.runs(0)[0].members) == [0, 1]
    assert rig.received(2) == [Removed(2, 3, Reason.LATE, False)], "it has sent three requests"
    rig.send(2, Request())
    assert 2 in rig.generator
    assert [type(message) for message in rig.received(0)] == [Added]
    assert [run.members for run in rig.runs(2)] == [(2,)]


def test_member_that_dies_before_its_acknowledgement_is_excluded() -> None:
    """It has its average, and its acknowledgement is lost."""
    rig = Rig()
    rig.round(0, 1, 2)
    rig.advance(1.0)
    for worker in range(3):
        rig.send(worker, Request())
    (run,) = rig.runs(0)
    for worker in (0, 1):
        rig.send(worker, Done(run.number, run.epoch))
    rig.advance(1.0)
    rig.received(2)
    rig.send(0, Request())
    rig.send(1, Request())
    rig.received(0)
    rig.advance(3.0)
    assert rig.received(2) == [Keepalive()]
    assert 2 in rig.generator
    rig.advance(5.0)
    assert 2 not in rig.generator


def test_late_acknowledgement_does_not_shorten_the_next_timeout() -> None:
    rig = Rig()
    rig.round(0, 1, 2)
    rig.advance(1.0)
    for worker in range(3):
        rig.send(worker, Request())
    (run,) = rig.runs(0)
    rig.send(0, Done(run.number, run.epoch))
    rig.advance(6.0)
    rig.send(1, Done(run.number, run.epoch))
    rig.send(2, Done(run.number, run.epoch))
    rig.send(0, Request())
    rig.advance(6.0)
    assert all(worker in rig.generator for worker in range(3))


def test_worker_that_waits_for_its_own_group_is_not_late_for_a_later_one() -> None:
    """Without a buffer a worker takes part in groups while it waits."""
    rig = Rig()
    rig.generator.rules = Rules.random(2)
    groups = iter([[[0, 1]], [[1, 2]], [[2, 0]]])
    rig.generator._policy = lambda initiator, crowd: next(groups)
    rig.advance(1.0)
    rig.send(0, Request())
    rig.send(1, Request())
    rig.send(0, Done(0, 0))
    rig.advance(1.0)
    rig.send(1, Done(0, 0))
    rig.advance(58.0)
    rig.send(2, Request())
    rig.send(2, Done(1, 0))
    rig.advance(1.0)
    assert 1 in rig.generator


def test_worker_that_nobody_waits_for_is_never_late() -> None:
    rig = Rig()
    rig.round(0, 1, 2)
    rig.advance(1000.0)
    rig.advance(10.0)
    assert all(worker in rig.generator for worker in range(3))
    assert [[type(message) for message in rig.received(worker)] for worker in range(3)] == [
        [Keepalive] for _ in range(3)
    ], "each is probed once"


def test_unfinished_members_of_a_running_group_are_probed_each_second() -> None:
    rig = Rig()
    rig.round(0, 1, 2, seconds=10.0)
    rig.advance(10.0)
    for worker in range(3):
        rig.send(worker, Request())
    (run,) = rig.runs(0)
    rig.send(0, Done(run.number, run.epoch))
    for worker in range(3):
        rig.received(worker)
    for _ in range(4):
        rig.advance(0.5)
    kinds = [[type(message) for message in rig.received(worker)] for worker in range(3)]
    assert kinds == [[], [Keepalive] * 2, [Keepalive] * 2]


@pytest.mark.parametrize(
    ("rules", "silence"),
    [
        (Rules.all_workers(), 5.0),
        (Rules.all_workers(quorum=2, grace=1.0), 2.0),
        (Rules.all_workers(quorum=2, grace=3.0), 3.0),
        (Rules.all_workers(quorum=2, grace=60.0), 5.0),
    ],
)
def test_generator_with_a_quorum_counts_workers_as_silent_earlier(
    monkeypatch: pytest.MonkeyPatch, rules: Rules, silence: float
) -> None:
    opened = {}

    def open_mailbox(store: Any, number: int, peers: Any, **options: Any) -> FakeMailbox:
        opened[number] = options["limits"].silence
        return FakeMailbox(3)

    monkeypatch.setattr(service, "open_mailbox", open_mailbox)
    config = GeneratorConfig(
        room="groups", host_of=(0, 0, 0), interfaces=(), timeout=20.0, rules=rules, seed=0
    )
    config.connect(Switchboard())  # type: ignore[arg-type]
    config.client(Switchboard(), 1)  # type: ignore[arg-type]
    assert opened == {3: silence, 1: 5.0}


def test_member_reported_lost_is_removed_and_the_rest_run_again() -> None:
    rig = Rig()
    for worker in range(3):
        rig.send(worker, Request())
    (run,) = rig.runs(0)
    rig.send(0, Lost(run.number, run.epoch, 2))
    again = rig.runs(0)
    assert [(each.number, each.epoch) for each in again] == [(run.number, 1)]
    assert sorted(again[0].members) == [0, 1]
    # The other member found out as well; this changes nothing.
    rig.send(1, Lost(run.number, run.epoch, 2))
    assert rig.runs(0) == []
    assert 0 in rig.generator


def test_members_lost_with_one_that_has_completed_the_group_run_again_at_once() -> None:
    """It was killed before the others had its last data; they are not late."""
    rig = Rig()
    for worker in range(3):
        rig.send(worker, Request())
    (run,) = rig.runs(2)
    rig.send(2, Done(run.number, run.epoch))
    for worker in (0, 1):
        rig.received(worker)
    rig.send(0, Lost(run.number, run.epoch, 2))
    rig.send(1, Lost(run.number, run.epoch, 2))
    for worker in (0, 1):
        (again,) = rig.runs(worker)
        assert (again.number, again.epoch) == (run.number, 1)
        assert sorted(again.members) == [0, 1]


@pytest.mark.parametrize("ids", [(0, 0, 0), (0, 0, 3), (1, 0, 1), (0, 1, 1)])
def test_lost_report_from_outside_the_group_is_ignored(ids: tuple[int, int, int]) -> None:
    rig = Rig(workers=4, size=2)
    for worker in range(4):
        rig.send(worker, Request())
    pair = next(run.members for run in rig.runs(0))
    if ids[2] in pair and ids[2] != 0 and ids[:2] == (rig.generator._buffers[0][0].number, 0):
        pytest.skip("they are")
    rig.send(0, Lost(*ids))
    assert all(worker in rig.generator for worker in range(4))


@pytest.mark.parametrize(
    "nonsense",
    [(2, (5, 0, 0, 0)), (1, (0,) * 4), (1, (2, 0, 0, 0)), (8, (0,) * 4), (3, (0, 0, 3, 0)),
     (99, (0,) * 4), (1, (0,) * 4, b"abcd")],
)  # fmt: skip
def test_protocol_violation_removes_its_sender_only(nonsense: Any) -> None:
    rig = Rig()
    for worker in range(3):
        rig.send(worker, Request()) if worker < 2 else None
    rig.box.inbox.append(Received(*nonsense, peer=1))
    rig.service.step(rig.box.poll())
    assert rig.box.refused == {"content": 1}
    messages = rig.received(1)
    assert [type(message) for message in messages] == [Refused]
    assert messages[0].reason
    rig.send(2, Request())
    assert sorted(rig.runs(0)[-1].members) == [0, 2]
    rig.send(1, Request())
    assert rig.received(1) == []
    assert 1 not in rig.generator


def test_members_receive_connection_ids_and_ids_to_close() -> None:
    rig = Rig()

    def meet() -> list[tuple[int, tuple[int, ...]]]:
        for worker in range(3):
            rig.send(worker, Request())
        found = []
        for worker in range(3):
            for message in rig.runs(worker):
                found.append((message.connection, message.close))
                rig.send(worker, Done(message.number, message.epoch))
        return found

    assert meet() == [(1, ())] * 3
    assert meet() == [(1, ())] * 3
    rig.box.lost[2] = "has been silent"
    rig.advance(1.0)
    rig.send(0, Request())
    rig.send(1, Request())
    told = [rig.received(worker)[-1] for worker in (0, 1)]
    assert [(each.connection, each.close) for each in told] == [(2, (1,))] * 2


def test_service_ends_when_all_have_left() -> None:
    rig = Rig()
    rig.box.left.update(range(3))
    looks = iter(range(100))
    rig.service._clock = lambda: float(next(looks))  # type: ignore[method-assign]
    rig.service.run()
    assert rig.box.closed


def test_service_ends_with_the_worker_that_started_it() -> None:
    rig = Rig()
    rig.service.run(lambda: False)
    assert rig.box.closed
    said = [rig.received(worker) for worker in range(3)]
    assert said == [[], *[[Removed(0, 0, Reason.LATE, False)]] * 2]


# -- all of them -----------------------------------------------------------------------------


def test_synchronizing_worker_receives_keepalives_until_all_synchronize() -> None:
    rig = Rig()
    rig.round(0, 1, 2)
    rig.send(0, Synchronize())
    for _ in range(2):
        rig.advance(26.0)
        assert Keepalive in [type(message) for message in rig.received(0)], "a quarter of 100 s"
        rig.round(1, 2)
    rig.send(1, Synchronize())
    rig.send(2, Synchronize())
    (run,) = rig.runs(0)
    assert sorted(run.members) == [0, 1, 2]


def test_live_worker_is_in_the_synchronization_however_long_it_takes() -> None:
    rig = Rig()
    for _ in range(3):
        rig.round(0, 1, 2)
    rig.send(0, Synchronize())
    rig.send(1, Synchronize())
    for _ in range(10):
        rig.advance(1000.0)
        alive = [message[0] for message in rig.received(0) if isinstance(message, Keepalive)]
        assert alive == [2], "the worker that it waits for"
    rig.send(2, Synchronize())
    assert sorted(rig.runs(0)[-1].members) == [0, 1, 2]


def with_a_late_worker() -> Rig:
    """After steps of three, two have sent requests, and waited for worker 2 until its timeout."""
    rig = Rig()
    for _ in range(3):
        rig.round(0, 1, 2)
    rig.send(0, Request())
    rig.send(1, Request())
    rig.advance(10.0)
    return rig


@pytest.mark.parametrize("early", [False, True])
def test_late_worker_is_in_the_synchronization(early: bool) -> None:
    """It has made fewer steps, and waits in a barrier that the others reach later."""
    rig = with_a_late_worker()
    for worker in (0, 1):
        (run,) = rig.runs(worker)
        assert sorted(run.members) == [0, 1]
        rig.send(worker, Done(run.number, run.epoch))
    assert [message[2] for message in rig.received(2) if isinstance(message, Removed)] == [
        Reason.LATE
    ]
    for worker in (2, 0, 1) if early else (0, 1, 2):
        assert not rig.runs(0)
        rig.send(worker, Synchronize())
    assert sorted(rig.runs(0)[-1].members) == [0, 1, 2]


@pytest.mark.parametrize("how", ["left", "lost", "cut"])
def test_late_worker_that_ends_does_not_delay_the_synchronization(how: str) -> None:
    rig = with_a_late_worker()
    for worker in (0, 1):
        (run,) = rig.runs(worker)
        rig.send(worker, Done(run.number, run.epoch))
        rig.send(worker, Synchronize())
    assert not rig.runs(0)
    if how == "left":
        rig.box.left.add(2)
    else:
        getattr(rig.box, how)[2] = {"lost": "has been silent", "cut": 60.0}[how]
    rig.advance(1.0)
    assert sorted(rig.runs(0)[-1].members) == [0, 1]


def test_worker_that_missed_a_synchronization_learns_it_in_its_own() -> None:
    rig = Rig(workers=2)
    rig.round(0, 1)
    rig.box.lost[1] = "has been silent"
    rig.advance(1.0)
    rig.send(0, Synchronize())
    (run,) = rig.runs(0)
    rig.send(0, Done(run.number, run.epoch))
    rig.box.lost.clear()
    rig.box.left.add(0)
    rig.advance(1.0)
    rig.received(1)
    rig.send(1, Synchronize())
    outs = [
        message for message in rig.received(1) if isinstance(message, Removed) and message[0] == 0
    ]
    assert {message[2:] for message in outs} == {(Reason.LEFT, 1), (Reason.FINISHED, 1)}


def test_worker_that_was_in_the_last_synchronization_has_missed_none() -> None:
    rig = Rig(workers=2)
    rig.round(0, 1)
    for worker in (0, 1):
        rig.send(worker, Synchronize())
    for worker in (0, 1):
        (run,) = rig.runs(worker)
        rig.send(worker, Done(run.number, run.epoch))
    rig.box.left.add(0)
    rig.advance(1.0)
    rig.received(1)
    rig.send(1, Synchronize())
    outs = [message for message in rig.received(1) if isinstance(message, Removed)]
    assert {message[2:] for message in outs} == {(Reason.LEFT, 0)}


def test_members_of_a_synchronization_learn_who_has_left_after_one_that_none_of_them_has() -> None:
    """Worker 3 completes it and leaves; the average of the others fails because of worker 2."""
    rig = Rig(workers=4)
    for worker in range(4):
        rig.send(worker, Synchronize())
    (run,) = rig.runs(3)
    rig.send(3, Done(run.number, run.epoch))
    rig.box.left.add(3)
    rig.advance(1.0)
    for worker in (0, 1):
        rig.received(worker)
    rig.send(0, Lost(run.number, run.epoch, 2))
    for worker in (0, 1):
        messages = rig.received(worker)
        *_, last = (m for m in messages if isinstance(m, Removed) and m.worker == 3)
        again = next(m for m in messages if isinstance(m, RunMessage))
        assert again.members == (0, 1)
        assert last.reason == Reason.FINISHED
        assert messages.index(last) < messages.index(again)


def test_worker_that_leaves_after_a_synchronization_of_a_member_has_no_other_model() -> None:
    rig = Rig(workers=3)
    for _ in range(2):
        for worker in range(3):
            rig.send(worker, Synchronize())
        for worker in range(3):
            (run,) = rig.runs(worker)
            rig.send(worker, Done(run.number, run.epoch))
    rig.box.left.add(2)
    rig.advance(1.0)
    for worker in (0, 1):
        rig.received(worker)
        rig.send(worker, Synchronize())
    messages = [*rig.received(0), *rig.received(1)]
    assert RunMessage in map(type, messages)
    assert Reason.FINISHED not in [m.reason for m in messages if isinstance(m, Removed)]


def test_worker_that_waits_for_a_long_step_learns_for_whom() -> None:
    rig = Rig()
    for _ in range(3):
        rig.round(0, 1, 2, seconds=100.0)
    rig.send(0, Request())
    rig.advance(6.0)
    alive = [message[0] for message in rig.received(0) if isinstance(message, Keepalive)]
    assert alive == [1]


def test_step_after_a_synchronization_has_the_first_timeout() -> None:
    rig = Rig()
    for _ in range(3):
        rig.round(0, 1, 2)
    for worker in range(3):
        rig.send(worker, Synchronize())
    for worker in range(3):
        run = rig.runs(worker)[-1]
        rig.send(worker, Done(run.number, run.epoch))
    rig.send(0, Request())
    rig.send(1, Request())
    rig.advance(90.0)
    assert 2 in rig.generator, "it may save a checkpoint"
    rig.send(2, Request())
    for worker in range(3):
        run = rig.runs(worker)[-1]
        rig.send(worker, Done(run.number, run.epoch))
    rig.send(0, Request())
    rig.send(1, Request())
    rig.advance(9.0)
    assert 2 not in rig.generator, "its steps are as short as before"


def test_excluded_worker_that_copies_state_fetches_before_it_is_active() -> None:
    """It may be at another fragment of the model, so that a group with it would hang."""
    rig = Rig(rules=Rules.all_workers())
    for worker in range(3):
        rig.send(worker, Request(copies_state=True))
    run = rig.runs(0)[0]
    for worker in range(3):
        rig.send(worker, Done(run.number, run.epoch))
    for worker in (0, 1):
        rig.send(worker, Request(copies_state=True))
    rig.advance(200.0)
    again = rig.runs(0)[-1]
    assert sorted(again.members) == [0, 1]
    for worker in range(3):
        rig.received(worker)
    for asked in (2, 3):  # however many requests it sends
        rig.send(2, Request(copies_state=True))
        assert [(type(m), m[:2]) for m in rig.received(2)] == [(Removed, (2, asked))]
    assert 2 not in rig.generator
    for worker in (0, 1):
        rig.send(worker, Done(again.number, again.epoch))
    rig.send(2, FetchState(-1, join=True))
    assert 2 not in rig.generator, "nobody has a state to send before the end of a step"
    rig.advance(6.0)
    assert [type(m) for m in rig.received(2)] == [Keepalive]
    for worker in (0, 1):
        rig.received(worker)
    rig.send(0, Request(copies_state=True))
    assert [type(m) for m in rig.received(0)] == [Added, SendState]
    assert rig.received(2)[-1] == SendState(0, 2, rig.service._connections._last_id)
    assert 2 in rig.generator
    rig.send(1, Request(copies_state=True))
    assert not rig.runs(1), "the group waits for the one that copies"
    rig.send(2, Fetched())
    rig.send(2, Request(copies_state=True))
    assert [sorted(run.members) for run in rig.runs(2)] == [[0, 1, 2]]


def test_quorum_runs_without_late_workers_when_its_grace_ends() -> None:
    rig = Rig(4, rules=Rules.all_workers(quorum=2, grace=1.0))
    for worker in (0, 1):
        rig.send(worker, Request(copies_state=True))
    assert rig.service.idle_s() == rig.service.check_s
    rig.advance(0.9)
    assert rig.service.idle_s() == pytest.approx(0.1)
    assert not rig.runs(0)
    rig.send(2, Request(copies_state=True))
    rig.advance(0.1)
    messages = rig.received(0)
    assert messages[0] == Removed(3, 0, Reason.LATE, False)
    assert sorted(messages[-1].members) == [0, 1, 2]
    assert 3 not in rig.generator


def test_fetch_of_a_worker_that_ends_is_dropped() -> None:
    rig = Rig(rules=Rules.all_workers(quorum=2, grace=1.0))
    for worker in (0, 1):
        rig.send(worker, Request(copies_state=True))
    rig.advance(1.0)
    run = rig.runs(0)[0]
    rig.send(2, Request(copies_state=True))
    rig.send(2, FetchState(-1, join=True))
    assert rig.service._fetches, "both average, and have no state until then"
    rig.box.left.add(2)
    rig.advance(1.0)
    assert not rig.service._fetches
    for worker in (0, 1):
        rig.send(worker, Done(run.number, run.epoch))
        rig.send(worker, Request(copies_state=True))
    assert sorted(rig.runs(0)[-1].members) == [0, 1]


def test_last_worker_that_copies_state_has_missed_nothing() -> None:
    rig = Rig(workers=2)
    rig.send(0, Request(copies_state=True))
    rig.advance(101.0)
    assert 1 not in rig.generator
    rig.box.left.add(0)
    rig.advance(1.0)
    rig.received(1)
    rig.send(1, Request(copies_state=True))
    assert [run.members for run in rig.runs(1)] == [(1,)]


def test_excluded_worker_becomes_active_by_synchronizing() -> None:
    rig = Rig()
    rig.send(0, Request())
    rig.advance(101.0)
    assert [worker in rig.generator for worker in range(3)] == [True, False, False]
    rig.send(1, Synchronize())
    assert type(rig.received(1)[-1]) is Added
    (run,) = rig.runs(0)
    rig.send(0, Done(run.number, run.epoch))
    rig.send(0, Synchronize())
    rig.send(2, Synchronize())
    assert sorted(rig.runs(1)[0].members) == [0, 1, 2]


# -- coming back --------------------------------------------------------------------------------


def test_rejoined_worker_is_connected_and_becomes_active_by_a_request() -> None:
    rig = Rig()
    rig.round(0, 1, 2)
    rig.box.lost[1] = "has been silent"
    rig.advance(1.0)
    rig.send(0, Request())
    assert 1 not in rig.generator
    rig.received(0)
    assert list(restart(rig, 2, object())._acknowledgements) == [(2, 1)]
    assert 2 not in rig.generator, "the old process is removed"
    told = rig.received(0)
    assert [type(message) for message in told] == [Removed, RunMessage]
    assert (told[0].worker, told[1].number) == (2, 1)
    assert [(type(message), message[:2]) for message in rig.received(2)] == [(Removed, (1, 1))]
    rig.send(2, Request())
    assert [(type(message), message[:2]) for message in rig.received(0)] == [(Added, (2,))]


def test_rejoined_worker_does_not_count_as_failed_because_of_its_former_process() -> None:
    rig = Rig()
    rig.round(0, 1, 2)
    rig.box.left.add(2)
    restart(rig, 2, object())  # connected in the turn that finds that it has left
    rig.send(2, Request())
    rig.advance(1.0)
    assert 2 in rig.generator


def test_rejoined_worker_without_a_state_has_no_other_model_than_a_survivor() -> None:
    rig = Rig()
    rig.round(0, 1, 2)
    rig.box.left.add(1)
    restart(rig, 2, object())
    rig.received(0)
    rig.send(0, Synchronize())
    rig.box.cut = {2: RECONNECT_S + 1.0}  # it ends again before it has copied a state
    rig.advance(1.0)
    received = rig.received(0)
    told = {each.worker: each.reason for each in received if isinstance(each, Removed)}
    assert told == {1: Reason.LEFT, 2: Reason.DIED}
    assert [m.members for m in received if isinstance(m, RunMessage)] == [(0,)]


@pytest.mark.parametrize("how", ["restarted", "silent"])
def test_synchronization_waits_for_a_worker_that_has_returned_and_copies_a_state(how: str) -> None:
    rig = Rig()
    rig.round(0, 1, 2)
    if how == "restarted":
        restart(rig, 2, object())
    else:
        rig.box.lost[2] = "has been silent"
        rig.advance(1.0)
        assert 2 not in rig.generator
        rig.box.lost.clear()
        rig.advance(1.0)
    for worker in (0, 1):
        rig.send(worker, Synchronize())
    rig.advance(10.0)
    received = rig.received(0)
    assert Keepalive(2) in received
    assert not any(isinstance(each, RunMessage) for each in received)
    rig.send(2, FetchState(-1, join=True))
    assert any(isinstance(each, SendState) for each in rig.received(0) + rig.received(1))
    rig.send(2, Fetched())
    rig.send(2, Synchronize())
    assert [run.members for run in rig.runs(2)] == [(0, 1, 2)]


def test_survivor_synchronizes_alone_once_the_end_of_the_last_other_is_known() -> None:
    rig = Rig(2)
    for worker in (0, 1):
        rig.send(worker, Synchronize())
    (run,) = rig.runs(1)
    rig.send(1, Lost(run.number, run.epoch, 0))  # its connections are not closed yet
    assert not rig.received(1)
    rig.box.cut = {0: 0.0}
    rig.advance(0.5)
    rig.box.cut = {0: RECONNECT_S + 1.0}
    rig.advance(RECONNECT_S + 0.5)
    told = rig.received(1)
    assert [m.reason for m in told if isinstance(m, Removed)][-1] == Reason.DIED
    assert [m.members for m in told if isinstance(m, RunMessage)] == [(1,)]


def test_worker_that_has_lost_the_last_other_but_live_one_synchronizes_alone_as_such() -> None:
    rig = Rig(2)
    for worker in (0, 1):
        rig.send(worker, Synchronize())
    (run,) = rig.runs(1)
    rig.send(1, Lost(run.number, run.epoch, 0))
    rig.advance(2 * RECONNECT_S + 0.5)
    told = rig.received(1)
    assert [m.reason for m in told if isinstance(m, Removed)][-1] == Reason.LATE
    assert [m.members for m in told if isinstance(m, RunMessage)] == [(1,)]


def test_rejoin_with_other_options_is_ignored() -> None:
    rig = Rig()
    assert not restart(rig, 2, OTHER_OPTIONS)._acknowledgements
    assert 2 not in rig.generator
    rig.send(2, Request())
    assert 2 not in rig.generator


def test_waiting_worker_sends_its_state_unless_it_was_lost_before() -> None:
    rig = Rig()
    rig.send(1, Request())
    meetings = []
    for lost, giver in ((-1, 1), (1, 0)):
        rig.send(2, FetchState(lost, join=False))
        (told,) = rig.received(2)
        assert (type(told), told[:2]) == (SendState, (giver, 2))
        assert rig.received(giver)[-1][1:3] == told[1:3]
        meetings.append(told[2])
    assert meetings == [1, 2], "each is another"
    rig.send(0, Synchronize())
    rig.box.lost[1] = "has been silent"
    rig.advance(1.0)
    rig.received(2)
    rig.send(2, FetchState(0, join=False))
    assert rig.received(2)[-1][:2] == (0, 2), "it may have been the connection: nobody else lives"
    rig.box.lost.update({0: "has been silent", 1: "has been silent"})
    rig.advance(1.0)
    rig.received(2)
    rig.send(2, FetchState(-1, join=False))
    assert rig.received(2)[-1][:2] == (2, 2), "nobody could"


def test_worker_that_copies_a_state_sends_none_before_it_has_it() -> None:
    rig = Rig()
    rig.round(0, 1, 2)
    for worker in (1, 2):
        rig.box.left.add(worker)
        restart(rig, worker, object())
        rig.send(worker, FetchState(-1, join=True))
        assert SendState not in [type(each) for each in rig.received(worker)]
    rig.send(0, Request())
    for worker in (1, 2):
        sent = [each for each in rig.received(worker) if type(each) is SendState]
        assert [each[:2] for each in sent] == [(0, worker)]
    rig.send(2, FetchState(0, join=True))
    assert rig.received(2)[-1][:2] == (0, 2), "worker 1 has no state yet"
    rig.box.lost[0] = "has been silent"
    rig.advance(1.0)
    rig.send(2, FetchState(0, join=True))
    assert rig.received(2)[-1][:2] == (2, 2), "no worker has a state"
    assert SendState not in [type(each) for each in rig.received(1)[1:]]
    rig.send(1, Fetched())
    rig.send(2, FetchState(0, join=True))
    rig.send(1, Request())
    assert rig.received(2)[-1][:2] == (1, 2)


def test_excluded_worker_sends_no_state_while_another_can() -> None:
    rig = Rig()
    rig.round(0, 1, 2)
    rig.box.cut[0] = 2 * RECONNECT_S
    rig.advance(1.0)
    rig.box.cut.clear()
    rig.send(0, Request())  # it waits, and would respond at once
    for worker in range(3):
        rig.received(worker)
    rig.send(2, FetchState(-1, join=False))
    assert [message[:2] for message in rig.received(1)] == [(1, 2)]
    for worker in (1, 2):
        rig.send(worker, Request())
    run = rig.runs(0)[-1]
    for worker in range(3):
        rig.send(worker, Done(run.number, run.epoch))
    rig.send(0, FetchState(-1, join=False))
    rig.send(0, Fetched())
    rig.send(0, Request())
    rig.received(0)
    rig.send(1, FetchState(-1, join=False))
    assert (SendState, (0, 1)) in [(type(message), message[:2]) for message in rig.received(0)]


# -- a generator that replaces another one ----------------------------------------------------


class Successor(Rig):
    """A second generator, to which workers 0 and 1 are expected to connect, and 2 is not."""

    def __init__(self) -> None:
        self.workers, self.clock, self.box = 3, Clock(), FakeMailbox(3)
        self.generator = Generator(Layout.even(1, 3), Rules.all_workers())
        self.log = MembershipClient(Switchboard(), "groups", 3, 4)
        self.log.log.view = View((0, 0, 1, 2))
        self.service = GroupService(
            self.box, self.generator, 3, 100.0, clock=self.clock, membership=self.log,
            incarnation=1, expected=(0, 1),  # type: ignore[arg-type]
        )  # fmt: skip

    def connect(self, worker: int) -> None:
        self.log._changes += [
            MembershipChange(worker, 0, False, worker),
            MembershipChange(worker, 1, True, worker, object()),  # type: ignore[arg-type]
        ]
        self.advance(0.0)


def test_expected_workers_are_awaited_by_groups_until_they_connect() -> None:
    rig = Successor()
    rig.connect(0)
    rig.send(0, Request())
    rig.advance(CONNECT_S - 1.0)
    assert not rig.runs(0)
    rig.connect(1)
    rig.send(1, Request())
    assert [run.members for run in rig.runs(0)] == [(0, 1)]


@pytest.mark.parametrize("logged", [False, True])
def test_expected_worker_that_does_not_connect_is_removed(logged: bool) -> None:
    """After a while; at once if others have logged its end."""
    rig = Successor()
    rig.connect(0)
    rig.send(0, Request())
    if logged:
        rig.log.log.view = View((2, 1, 1, 2))
        rig.log._changes.append(MembershipChange(1, 0, False, 0))
        rig.advance(0.0)
    else:
        rig.advance(CONNECT_S + 1.0)
    assert [run.members for run in rig.runs(0)] == [(0,)]
    rig.connect(1)  # groups have continued without it
    rig.send(1, Request())
    assert Removed(1, 1, Reason.SILENT, True) in rig.received(1)


def test_rejoining_worker_waits_for_one_that_connects_and_has_a_state() -> None:
    rig = Successor()
    rig.connect(2)
    rig.send(2, FetchState(-1, join=False))
    assert SendState not in [type(message) for message in rig.received(2)]
    rig.connect(1)
    assert [m.sender for m in rig.received(2) if isinstance(m, SendState)] == [1]


def test_service_ends_when_the_log_has_a_later_generator() -> None:
    rig = Successor()
    rig.connect(0)
    rig.log.log.view = View((0, 0, 1, 4))
    rig.service.run()
    assert rig.box.closed
