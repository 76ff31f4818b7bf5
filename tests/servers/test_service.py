"""What a server does with what no worker should send, and with workers that are gone."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest

from helpers.mail import Clock
from helpers.serving import Box, Letter, Office
from wingbeat.errors import PeerError
from wingbeat.servers.outbox import Order
from wingbeat.servers.protocol import TEXT, Kind, wish_of
from wingbeat.servers.service import Service
from wingbeat.servers.sums import EACH
from wingbeat.transport.messages.mailbox import RECONNECT_S

SERVER = 3
ONES = np.ones(4, "f4")


@dataclass
class Rig:
    """One server and the mailboxes of three workers."""

    service: Service
    box: Box
    workers: list[Box]
    office: Office
    clock: Clock

    def send(self, rank: int, kind: int, ids: tuple[int, ...], **more: object) -> None:
        payload, dtype = more.get("payload", b""), str(more.get("dtype", ""))
        self.workers[rank].post(SERVER, kind, payload, ids=ids, dtype=dtype, urgency=0)

    def push(self, rank: int, number: int = 0, turn: int = 0, kind: Kind = Kind.PUSH) -> None:
        self.send(rank, kind, (0, number, turn, 0), payload=ONES * (rank + 1), dtype="float32")

    def run(self, rounds: int = 200) -> None:
        """Until everything has come to where it goes."""
        for _ in range(rounds):
            for _ in range(5):
                self.office.move()
            self.service.step(self.box.poll(keep=True))

    def heard(self, rank: int) -> list[Letter]:
        return [letter for letter in self.came(rank) if letter.kind != Kind.ALIVE]

    def came(self, rank: int) -> list[Letter]:
        return list(iter(self.workers[rank].poll, None))

    def reasons(self) -> list[list[str]]:
        found = [self.heard(rank) for rank in range(3)]
        return [
            [bytes(each.payload).decode() for each in letters if each.kind == Kind.FAILED]
            for letters in found
        ]


def rig(order: Order = Order.READY, most: int = 1 << 20) -> Rig:
    office, clock = Office(random.Random(0), 3), Clock()
    workers = [office.box(rank) for rank in range(3)]
    box = office.box(SERVER)
    service = Service(box, 3, most=most, order=order, timeout=5.0, clock=clock)  # type: ignore[arg-type]
    return Rig(service, box, workers, office, clock)


@pytest.mark.parametrize("kind", [Kind.STORE, Kind.PUSH])
def test_a_sum_comes_in_the_class_that_was_asked_for_last(kind: Kind) -> None:
    made = rig()
    for rank in range(3):
        made.send(rank, kind, (0, 0, 0, wish_of(rank % 2, 4)), payload=ONES, dtype="float32")
    if kind is Kind.STORE:
        made.run()
        for rank in range(3):  # thresholds have changed since
            made.send(rank, Kind.PULL, (0, 0, 0, wish_of(1 - rank % 2, 4)))
    made.run()
    letters = [made.heard(rank) for rank in range(3)]
    asked = [0, 1, 0] if kind is Kind.PUSH else [1, 0, 1]
    assert [[each.urgency for each in own] for own in letters] == [[each] for each in asked]
    assert all(bytes(own[0].payload) == (3 * ONES).tobytes() for own in letters)


def assert_all_are_told(made: Rig, text: str) -> None:
    made.run()
    for lines in made.reasons():
        assert len(lines) == 1, "each worker hears of it once"
        assert text in lines[0]
        assert "\n" not in lines[0]
    held = made.service._sums.nbytes, len(made.service._pulls), made.service._outbox.waiting
    made.push(0, number=77)
    made.run()
    assert made.reasons() == [[], [], []], "once is enough"
    now = made.service._sums.nbytes, len(made.service._pulls), made.service._outbox.waiting
    assert now == held, "and nothing is taken any more"


@pytest.mark.parametrize(
    ("kind", "ids", "fields", "text"),
    [
        (Kind.SUM, (0, 0, 0, 0), {}, "rank 1 sent a message of kind 4"),
        (Kind.FAILED, (0, 0, 0, 0), {"payload": b"x" * 200}, "rank 1 sent a message of kind 5"),
        (2**32 - 1, (0, 0, 0, 0), {}, "rank 1 sent a message of kind 4294967295"),
        (Kind.PULL, (0, 0, 0, wish_of(2, 0)), {}, "rank 1 asks for class 2"),
        (Kind.PUSH, (0, 0, 0, 2**32 - 1), {}, "rank 1 asks for class 15"),
        (Kind.PULL, (0, 0, 1, 0), {}, "slice 0 of round 1 was pulled after round -1"),
        (Kind.PULL, (0, 0, 2**32 - 1, 0), {}, "was pulled after round -1"),
        (Kind.PUSH, (0, 0, 1, 0), {"payload": ONES, "dtype": "float32"}, "in round -1"),
        (Kind.STORE, (0, 0, 0, 0), {}, "rank 1 pushed nothing; allowed: float32"),
        (Kind.STORE, (0, 0, 0, 0), {"dtype": "float32"}, "rank 1 pushed 0 bytes"),
        (Kind.PUSH, (0, 0, 0, 0), {"payload": b"abcde", "dtype": "float32"}, "no float32"),
        (Kind.PUSH, (0, 0, 0, 0), {"payload": b"abcd", "dtype": "int64"}, "rank 1 pushed int64"),
        (Kind.PUSH, (9, 2**32 - 1, 7, 0), {"payload": b"abcd", "dtype": "float32"}, "round 7"),
    ],
)  # fmt: skip
def test_what_no_worker_may_send_ends_the_sums_and_all_are_told_why(
    kind: int, ids: tuple[int, ...], fields: dict[str, object], text: str
) -> None:
    made = rig()
    made.send(1, kind, ids, **fields)
    assert_all_are_told(made, text)


@pytest.mark.parametrize("twice", [(Kind.PULL, Kind.PULL), (Kind.PUSH, Kind.PULL)])
@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("order", Order)
def test_a_sum_is_sent_to_each_worker_once(
    twice: tuple[Kind, Kind], complete: bool, order: Order
) -> None:
    made = rig(order)
    for kind in twice:
        if kind is Kind.PUSH:
            made.push(1)
        else:
            made.send(1, Kind.PULL, (0, 0, 0, 0))
        made.run(50)
        if complete and kind is twice[0]:
            for rank in {0, 1, 2} - ({1} if kind is Kind.PUSH else set()):
                made.push(rank, kind=Kind.STORE)
            made.run(50)
    sums = [each for each in made.heard(1) if each.kind == Kind.SUM]
    assert len(sums) == complete
    # What is said is in the mail of the two others alone: rank 1's was just taken.
    assert ["rank 1 wants slice 0 of round 0 twice"] in made.reasons()


def test_pulls_without_end_are_refused() -> None:
    made = rig(most=20 * EACH)
    for number in range(30):
        made.send(1, Kind.PULL, (0, number, 0, 0))
    assert_all_are_told(made, "rank 1 waits for more than 20 sums")
    assert sum(map(len, made.service._pulls.values())) == 20


def test_sums_that_have_been_sent_are_not_counted_as_waited_for() -> None:
    made = rig(most=4 * EACH)
    for turn in range(20):
        for rank in range(3):
            made.push(rank, turn=turn)
        made.run(40)
        for rank in range(3):
            (answer,) = made.heard(rank)
            assert np.frombuffer(answer.payload, "f4").tolist() == [6.0] * 4


@pytest.mark.parametrize("order", Order)
def test_workers_may_mix_pushes_and_pulls(order: Order) -> None:
    """Whoever pushes last: each has its sum once."""
    for last in range(3):
        made = rig(order)
        made.send(0, Kind.PULL, (0, 0, 0, 0))
        made.run(20)
        for rank in sorted(range(3), key=lambda r: r == last):
            made.push(rank, kind=Kind.STORE if rank == 0 else Kind.PUSH)
            made.run(20)
        made.run()
        for rank in range(3):
            assert [each.kind for each in made.heard(rank)] == [Kind.SUM]


def test_a_worker_that_lives_and_never_pushes_is_named_after_ten_timeouts() -> None:
    """It may evaluate, or save."""
    made = rig()
    made.push(1)
    made.run(20)
    made.clock.now = 49.9
    made.run(20)
    assert made.reasons() == [[], [], []]
    made.clock.now = 50.2
    assert_all_are_told(made, "no gradients of rank 0, 2 for slice 0 within 50 s")


def test_workers_are_probed_over_the_cards_that_gradients_come_by_while_one_is_missed() -> None:
    made = rig()
    made.box.interfaces = lambda peer: (0, 1, 2)  # type: ignore[method-assign]

    def probed() -> list[list[int]]:
        found = [made.came(rank) for rank in range(3)]
        return [sorted(m.interface for m in each if m.kind == Kind.ALIVE) for each in found]

    for number, link in enumerate((0, 2)):
        ids = (0, number, 0, wish_of(0, 0, link))
        made.send(1, Kind.STORE, ids, payload=ONES, dtype="float32")
    made.run(20)
    made.clock.now = 0.2
    made.run(20)
    assert probed() == [[], [], []], "too early"
    made.clock.now = 0.6
    made.run(40)
    assert probed() == [[0, 2]] * 3
    made.send(2, Kind.ALIVE, (0, 0, 0, 0))  # which is nothing
    made.box.gone.add(0)
    made.clock.now = 1.2
    made.run(40)
    assert probed()[0] == [], "it has left"
    assert made.reasons() == [[], [], []]


def test_nobody_is_probed_while_no_sum_waits() -> None:
    made = rig()
    for rank in range(3):
        made.push(rank)
    made.run()
    for made.clock.now in (1.0, 2.0, 4.0):
        made.run(20)
    assert [letter.kind for rank in range(3) for letter in made.came(rank)] == 3 * [Kind.SUM]


def test_a_worker_that_is_ahead_may_push_what_its_window_holds_and_no_more() -> None:
    """With one that is slow a server would else have to keep all gradients of all others."""
    made = rig()
    made.office.window = 5 * 66
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


@pytest.mark.parametrize("kind", [Kind.PULL, Kind.STORE])
def test_after_a_failure_nothing_holds_a_window(kind: Kind) -> None:
    made = rig()
    room = made.workers[2].room(SERVER, urgency=0)
    made.service._fail("over")
    for number in range(3):
        if kind is Kind.PULL:
            made.send(2, kind, (0, number, 0, 0))
        else:
            made.push(2, number, kind=kind)
    made.run(50)
    assert made.workers[2].room(SERVER, urgency=0) == room


def test_a_pull_holds_no_window() -> None:
    made = rig()
    room = made.workers[2].room(SERVER, urgency=0)
    made.send(2, Kind.PULL, (0, 0, 0, 0))
    made.run(50)
    assert made.workers[2].room(SERVER, urgency=0) == room


def test_who_is_ahead_with_another_slice_is_not_named_as_late() -> None:
    made = rig()
    made.push(1, 0)
    made.push(2, 1)
    made.run(20)
    made.clock.now = 50.2
    assert_all_are_told(made, "no gradients of rank 0 for slice")


def test_whoever_lacks_is_named_though_all_of_them_are_ahead() -> None:
    """They have pushed in different orders: it is better to name them than nobody."""
    made = rig()
    made.push(0, 0)
    made.push(2, 0)
    made.push(1, 1)
    made.run(20)
    made.clock.now = 5.2
    assert_all_are_told(made, "no gradients of rank 1 for slice 0")


def test_workers_are_told_that_the_one_that_started_it_is_gone() -> None:
    made = rig()
    made.box.next = lambda seconds, keep: made.box.poll(keep=keep)  # type: ignore[attr-defined]
    there = iter([True, True, False, False])
    made.service.run(lambda: next(there))
    for _ in range(100):
        made.office.move()
    assert made.reasons() == 3 * [["the worker that started it is gone"]]
    assert made.box.closed


def test_a_worker_that_has_left_is_named_if_a_sum_waits_for_it() -> None:
    made = rig()
    made.push(0)
    made.workers[2].close()
    made.run(20)
    made.clock.now = 1.0
    made.run()
    assert [lines for lines in made.reasons() if lines] == 2 * [["rank 2 has ended"]]


def test_a_worker_that_is_lost_is_named_if_a_sum_waits_for_it() -> None:
    made = rig()
    made.push(0)
    made.run(20)
    made.box.lost[1] = "gave no sign for 5 s"
    made.clock.now = 1.0
    made.run()
    assert made.reasons()[0] == ["rank 1 gave no sign for 5 s"]


def test_a_worker_without_connections_for_a_second_is_named_if_a_sum_waits_for_it() -> None:
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
    assert told[0] == told[2] == ["rank 1 has ended without a word: its connections are closed"]


def test_a_worker_without_connections_that_no_sum_waits_for_is_not_missed() -> None:
    made = rig()
    made.box.cut[1] = 9.0
    made.clock.now = 1.0
    made.run()
    assert made.reasons() == [[], [], []]


def test_what_a_worker_pushed_before_it_left_counts() -> None:
    """Its last gradients may still wait to be taken when it is known to have left."""
    made = rig()
    for number in range(60):
        for rank in range(3):
            made.push(rank, number)
    made.workers[2].close()
    for _ in range(3000):
        made.office.move()
    assert 2 in made.box.left
    for _ in range(20):
        made.clock.now += 1.0
        made.service.step(made.box.poll(keep=True))
    made.run(500)
    assert [each.kind for each in made.heard(0)] == 60 * [Kind.SUM]


def test_a_worker_that_leaves_as_its_sum_is_sent_disturbs_no_other() -> None:
    made = rig()
    post = made.box.post

    def leave_first(peer: int, *args: object, **kwargs: object) -> Letter:
        if peer == 2 and 2 not in made.box.gone:
            made.box.gone.add(2)
            raise PeerError("rank 2 has left, so this process cannot post to it")
        return post(peer, *args, **kwargs)  # type: ignore[arg-type]

    made.box.post = leave_first  # type: ignore[assignment, method-assign]
    for rank in range(3):
        made.push(rank)
    made.run()
    assert [[each.kind for each in made.heard(rank)] for rank in range(2)] == 2 * [[Kind.SUM]]


def test_a_long_reason_is_cut() -> None:
    made = rig()
    made.service._fail("é" * TEXT)
    made.run(20)
    (letter,) = made.heard(0)
    assert len(letter.payload) <= TEXT


@pytest.mark.parametrize(("order", "expected"), [(Order.READY, [1, 0]), (Order.FORWARD, [0, 1])])
def test_forward_holds_back_what_was_asked_for_later(order: Order, expected: list[int]) -> None:
    made = rig(order)
    for number in range(2):
        made.send(1, Kind.PULL, (0, number, 0, 0))
    made.run(20)
    for number in (1, 0):
        for rank in range(3):
            made.push(rank, number, kind=Kind.STORE)
        made.run(50)
    assert [letter.ids[1] for letter in made.heard(1)] == expected
