"""`Server`: invalid requests, lost workers and timeouts."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest

from helpers.mail import Clock
from helpers.server_simulation import FakeMailbox, FakeNetwork, SentMessage
from wingbeat.errors import PeerError
from wingbeat.methods.parameter_server.aggregator import SLICE_OVERHEAD, Aggregator
from wingbeat.methods.parameter_server.protocol import MAX_REASON, Kind, Order, pack_route
from wingbeat.methods.parameter_server.server import Server
from wingbeat.transport.detector import RECONNECT_S

SERVER = 3
ONES = np.ones(4, "f4")


@dataclass
class Rig:
    """One server and the mailboxes of three workers."""

    service: Server
    box: FakeMailbox
    workers: list[FakeMailbox]
    network: FakeNetwork
    clock: Clock

    def send(self, rank: int, kind: int, ids: tuple[int, ...], **more: object) -> None:
        payload, dtype = more.get("payload", b""), str(more.get("dtype", ""))
        self.workers[rank].post(SERVER, kind, payload, ids=ids, dtype=dtype, urgency=0)

    def push(self, rank: int, number: int = 0, turn: int = 0, kind: Kind = Kind.PUSH_PULL) -> None:
        self.send(rank, kind, (0, number, turn, 0), payload=ONES * (rank + 1), dtype="float32")

    def run(self, rounds: int = 200) -> None:
        """Until everything has come to where it goes."""
        for _ in range(rounds):
            for _ in range(5):
                self.network.move()
            self.service.step(self.box.poll(keep=True))

    def received(self, rank: int) -> list[SentMessage]:
        return [message for message in self.all_received(rank) if message.kind != Kind.PING]

    def all_received(self, rank: int) -> list[SentMessage]:
        return list(iter(self.workers[rank].poll, None))

    def reasons(self) -> list[list[str]]:
        found = [self.received(rank) for rank in range(3)]
        return [
            [bytes(each.payload).decode() for each in messages if each.kind == Kind.FAILED]
            for messages in found
        ]


def rig(order: Order = Order.READY, most: int = 1 << 20) -> Rig:
    network, clock = FakeNetwork(random.Random(0), 3), Clock()
    workers = [network.box(rank) for rank in range(3)]
    box = network.box(SERVER)
    service = Server(box, 3, Aggregator(3, most), order=order, timeout=5.0, clock=clock)  # type: ignore[arg-type]
    return Rig(service, box, workers, network, clock)


@pytest.mark.parametrize("kind", [Kind.PUSH, Kind.PUSH_PULL])
def test_sum_is_sent_in_class_of_last_request(kind: Kind) -> None:
    made = rig()
    for rank in range(3):
        made.send(rank, kind, (0, 0, 0, pack_route(rank % 2, 4)), payload=ONES, dtype="float32")
    if kind is Kind.PUSH:
        made.run()
        for rank in range(3):  # thresholds have changed since
            made.send(rank, Kind.PULL, (0, 0, 0, pack_route(1 - rank % 2, 4)))
    made.run()
    messages = [made.received(rank) for rank in range(3)]
    asked = [0, 1, 0] if kind is Kind.PUSH_PULL else [1, 0, 1]
    assert [[each.urgency for each in own] for own in messages] == [[each] for each in asked]
    assert all(bytes(own[0].payload) == (3 * ONES).tobytes() for own in messages)


def assert_all_are_told(made: Rig, text: str) -> None:
    made.run()
    for lines in made.reasons():
        assert len(lines) == 1, "each worker hears of it once"
        assert text in lines[0]
        assert "\n" not in lines[0]
    held = made.service._aggregator.nbytes, len(made.service._pulls), made.service._queue.queued
    made.push(0, number=77)
    made.run()
    assert made.reasons() == [[], [], []], "once is enough"
    now = made.service._aggregator.nbytes, len(made.service._pulls), made.service._queue.queued
    assert now == held, "and nothing is taken any more"


@pytest.mark.parametrize(
    ("kind", "ids", "fields", "text"),
    [
        (Kind.SUM, (0, 0, 0, 0), {}, "rank 1 sent a message of kind 4"),
        (Kind.FAILED, (0, 0, 0, 0), {"payload": b"x" * 200}, "rank 1 sent a message of kind 5"),
        (2**32 - 1, (0, 0, 0, 0), {}, "malformed message: kind is 4294967295; allowed: 1, 2"),
        (Kind.PULL, (0, 0, 0, pack_route(2, 0)), {}, "rank 1 requested class 2; there are 2"),
        (Kind.PUSH_PULL, (0, 0, 0, 2**32 - 1), {}, "rank 1 requested class 15; there are 2"),
        (Kind.PULL, (0, 0, 1, 0), {}, "slice 0 of round 1 was pulled after round -1"),
        (Kind.PULL, (0, 0, 2**32 - 1, 0), {}, "was pulled after round -1"),
        (Kind.PUSH_PULL, (0, 0, 1, 0), {"payload": ONES, "dtype": "float32"}, "in round -1"),
        (Kind.PUSH, (0, 0, 0, 0), {}, "rank 1 pushed nothing; allowed: float32"),
        (Kind.PUSH, (0, 0, 0, 0), {"dtype": "float32"}, "rank 1 pushed 0 bytes"),
        (Kind.PUSH_PULL, (0, 0, 0, 0), {"payload": b"abcde", "dtype": "float32"}, "no float32"),
        (Kind.PUSH_PULL, (0, 0, 0, 0), {"payload": b"abcd", "dtype": "int64"}, "1 pushed int64"),
        (Kind.PUSH_PULL, (9, 2**32 - 1, 7, 0), {"payload": b"abcd", "dtype": "float32"}, "round 7"),
    ],
)  # fmt: skip
def test_invalid_request_fails_all_workers_with_reason(
    kind: int, ids: tuple[int, ...], fields: dict[str, object], text: str
) -> None:
    made = rig()
    made.send(1, kind, ids, **fields)
    assert_all_are_told(made, text)


@pytest.mark.parametrize("twice", [(Kind.PULL, Kind.PULL), (Kind.PUSH_PULL, Kind.PULL)])
@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("order", Order)
def test_second_request_for_a_sum_fails(
    twice: tuple[Kind, Kind], complete: bool, order: Order
) -> None:
    made = rig(order)
    for kind in twice:
        if kind is Kind.PUSH_PULL:
            made.push(1)
        else:
            made.send(1, Kind.PULL, (0, 0, 0, 0))
        made.run(50)
        if complete and kind is twice[0]:
            for rank in {0, 1, 2} - ({1} if kind is Kind.PUSH_PULL else set()):
                made.push(rank, kind=Kind.PUSH)
            made.run(50)
    sums = [each for each in made.received(1) if each.kind == Kind.SUM]
    assert len(sums) == complete
    # What is said is in the mail of the two others alone: rank 1's was just taken.
    assert ["rank 1 requested slice 0 of round 0 twice"] in made.reasons()


def test_too_many_pending_pulls_fail() -> None:
    made = rig(most=20 * SLICE_OVERHEAD)
    for number in range(30):
        made.send(1, Kind.PULL, (0, number, 0, 0))
    assert_all_are_told(made, "rank 1 has more than 20 pending pulls")
    assert sum(map(len, made.service._pulls.values())) == 20


def test_sent_sums_do_not_count_as_pending() -> None:
    made = rig(most=4 * SLICE_OVERHEAD)
    for turn in range(20):
        for rank in range(3):
            made.push(rank, turn=turn)
        made.run(40)
        for rank in range(3):
            (answer,) = made.received(rank)
            assert np.frombuffer(answer.payload, "f4").tolist() == [6.0] * 4


@pytest.mark.parametrize("order", Order)
def test_mixed_push_and_pull_sends_each_sum_once(order: Order) -> None:
    """Whoever pushes last: each has its sum once."""
    for last in range(3):
        made = rig(order)
        made.send(0, Kind.PULL, (0, 0, 0, 0))
        made.run(20)
        for rank in sorted(range(3), key=lambda r: r == last):
            made.push(rank, kind=Kind.PUSH if rank == 0 else Kind.PUSH_PULL)
            made.run(20)
        made.run()
        for rank in range(3):
            assert [each.kind for each in made.received(rank)] == [Kind.SUM]


def test_live_worker_without_push_fails_after_ten_timeouts() -> None:
    """It may evaluate, or save."""
    made = rig()
    made.push(1)
    made.run(20)
    made.clock.now = 49.9
    made.run(20)
    assert made.reasons() == [[], [], []]
    made.clock.now = 50.2
    assert_all_are_told(made, "no gradients from rank 0, rank 2 for slice 0 within 50 s")


def test_incomplete_sum_pings_workers_over_used_links() -> None:
    made = rig()
    made.box.interfaces = lambda peer: (0, 1, 2)  # type: ignore[method-assign]

    def probed() -> list[list[int]]:
        found = [made.all_received(rank) for rank in range(3)]
        return [sorted(m.interface for m in each if m.kind == Kind.PING) for each in found]

    for number, link in enumerate((0, 2)):
        ids = (0, number, 0, pack_route(0, 0, link))
        made.send(1, Kind.PUSH, ids, payload=ONES, dtype="float32")
    made.run(20)
    made.clock.now = 0.2
    made.run(20)
    assert probed() == [[], [], []], "too early"
    made.clock.now = 0.6
    made.run(40)
    assert probed() == [[0, 2]] * 3
    made.send(2, Kind.PING, (0, 0, 0, 0))  # which is nothing
    made.box.gone.add(0)
    made.clock.now = 1.2
    made.run(40)
    assert probed()[0] == [], "it has left"
    assert made.reasons() == [[], [], []]


def test_complete_sums_send_no_pings() -> None:
    made = rig()
    for rank in range(3):
        made.push(rank)
    made.run()
    for made.clock.now in (1.0, 2.0, 4.0):
        made.run(20)
    assert [message.kind for rank in range(3) for message in made.all_received(rank)] == 3 * [
        Kind.SUM
    ]


def test_early_gradients_occupy_window_until_added() -> None:
    """With one that is slow a server would else have to keep all gradients of all others."""
    made = rig()
    made.network.window = 5 * 66
    room = [made.workers[rank].room(SERVER, urgency=0) for rank in range(3)]
    for number in range(4):
        made.push(2, number)
    made.run(50)
    assert made.workers[2].room(SERVER, urgency=0) == room[2] - 4 * 66, "all wait"
    made.push(1, 0)
    made.run(50)
    assert made.workers[1].room(SERVER, urgency=0) == room[1] - 66
    made.push(0, 0)
    made.push(0, 1)
    made.run(50)
    left = [made.workers[rank].room(SERVER, urgency=0) for rank in range(3)]
    assert left == [room[0], room[1], room[2] - 3 * 66], "rank 0 never waits, nor what was added"
    for number in (2, 3):
        made.push(0, number)
    for number in (1, 2, 3):
        made.push(1, number)
    made.run(100)
    assert [made.workers[rank].room(SERVER, urgency=0) for rank in range(3)] == room


@pytest.mark.parametrize("kind", [Kind.PULL, Kind.PUSH])
def test_messages_after_failure_free_their_window(kind: Kind) -> None:
    made = rig()
    room = made.workers[2].room(SERVER, urgency=0)
    made.service._report("over")
    for number in range(3):
        if kind is Kind.PULL:
            made.send(2, kind, (0, number, 0, 0))
        else:
            made.push(2, number, kind=kind)
    made.run(50)
    assert made.workers[2].room(SERVER, urgency=0) == room


def test_pull_frees_its_window() -> None:
    made = rig()
    room = made.workers[2].room(SERVER, urgency=0)
    made.send(2, Kind.PULL, (0, 0, 0, 0))
    made.run(50)
    assert made.workers[2].room(SERVER, urgency=0) == room


def test_timeout_does_not_name_worker_ahead_with_other_slice() -> None:
    made = rig()
    made.push(1, 0)
    made.push(2, 1)
    made.run(20)
    made.clock.now = 50.2
    assert_all_are_told(made, "no gradients from rank 0 for slice")


def test_timeout_names_late_worker_if_all_wait_for_each_other() -> None:
    """They have pushed in different orders: it is better to name them than nobody."""
    made = rig()
    made.push(0, 0)
    made.push(2, 0)
    made.push(1, 1)
    made.run(20)
    made.clock.now = 5.2
    assert_all_are_told(made, "no gradients from rank 1 for slice 0")


def test_run_after_parent_exit_fails_all_workers() -> None:
    made = rig()
    made.box.next = lambda seconds, keep: made.box.poll(keep=keep)  # type: ignore[attr-defined]
    there = iter([True, True, False, False])
    made.service.run(lambda: next(there))
    for _ in range(100):
        made.network.move()
    assert made.reasons() == 3 * [["the worker that started this server has ended"]]
    assert made.box.closed


def test_left_worker_with_incomplete_sum_fails() -> None:
    made = rig()
    made.push(0)
    made.workers[2].close()
    made.run(20)
    made.clock.now = 1.0
    made.run()
    assert [lines for lines in made.reasons() if lines] == 2 * [["rank 2 has left"]]


def test_lost_worker_with_incomplete_sum_fails() -> None:
    made = rig()
    made.push(0)
    made.run(20)
    made.box.lost[1] = "gave no sign for 5 s"
    made.clock.now = 1.0
    made.run()
    assert made.reasons()[0] == ["rank 1 gave no sign for 5 s"]


def test_unconnected_worker_with_incomplete_sum_fails_after_a_second() -> None:
    """A process that is killed says nothing; silence would take most of the timeout to tell."""
    made = rig()
    made.box.cut[1] = RECONNECT_S
    made.push(0)
    made.run(20)
    made.clock.now = 1.0
    made.run()
    assert made.reasons() == [[], [], []], "it may connect anew"
    made.box.cut[1] = RECONNECT_S + 0.1
    made.clock.now = 2.0
    made.run()
    told = made.reasons()
    assert told[0] == told[2] == ["rank 1 has ended unexpectedly: its connections are closed"]


def test_unconnected_worker_without_incomplete_sum_is_ignored() -> None:
    made = rig()
    made.box.cut[1] = 9.0
    made.clock.now = 1.0
    made.run()
    assert made.reasons() == [[], [], []]


def test_gradients_of_worker_that_left_are_added() -> None:
    """Its last gradients may still wait to be taken when it is known to have left."""
    made = rig()
    for number in range(60):
        for rank in range(3):
            made.push(rank, number)
    made.workers[2].close()
    for _ in range(3000):
        made.network.move()
    assert 2 in made.box.left
    for _ in range(20):
        made.clock.now += 1.0
        made.service.step(made.box.poll(keep=True))
    made.run(500)
    assert [each.kind for each in made.received(0)] == 60 * [Kind.SUM]


def test_worker_leaving_during_reply_does_not_affect_others() -> None:
    made = rig()
    post = made.box.post

    def leave_first(peer: int, *args: object, **kwargs: object) -> SentMessage:
        if peer == 2 and 2 not in made.box.gone:
            made.box.gone.add(2)
            raise PeerError("rank 2 has left, so this process cannot post to it")
        return post(peer, *args, **kwargs)  # type: ignore[arg-type]

    made.box.post = leave_first  # type: ignore[assignment, method-assign]
    for rank in range(3):
        made.push(rank)
    made.run()
    assert [[each.kind for each in made.received(rank)] for rank in range(2)] == 2 * [[Kind.SUM]]


def test_long_reason_is_truncated() -> None:
    made = rig()
    made.service._report("é" * MAX_REASON)
    made.run(20)
    (message,) = made.received(0)
    assert len(message.payload) <= MAX_REASON


@pytest.mark.parametrize(("order", "expected"), [(Order.READY, [1, 0]), (Order.FORWARD, [0, 1])])
def test_forward_order_delays_later_requests(order: Order, expected: list[int]) -> None:
    made = rig(order)
    for number in range(2):
        made.send(1, Kind.PULL, (0, number, 0, 0))
    made.run(20)
    for number in (1, 0):
        for rank in range(3):
            made.push(rank, number, kind=Kind.PUSH)
        made.run(50)
    assert [message.ids[1] for message in made.received(1)] == expected
