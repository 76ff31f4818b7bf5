"""Couriers on a network in memory: what the machines say arrives, in pieces and in order."""

from __future__ import annotations

import random
import struct
import time
from unittest.mock import Mock

import pytest

from helpers.couriers import Numbers, in_threads, packed, summed, trained
from helpers.mail import Clock
from helpers.server_simulation import FakeNetwork
from helpers.stale import gradient
from wingbeat.errors import PeerError
from wingbeat.exchanges.courier import Courier
from wingbeat.exchanges.lanes.lanes import BEGIN, MORE
from wingbeat.stale.messages import Round
from wingbeat.stale.pace import Pace
from wingbeat.stale.worker import Worker
from wingbeat.transport.loopback import Switchboard
from wingbeat.transport.messages import Limits, Mailbox, open_mailbox


class Crew:
    """Workers without threads: whatever may happen next does, as drawn from a seed."""

    def __init__(
        self, seed: int, n: int, pace: Pace, iterations: int, window: int = 1 << 20
    ) -> None:
        self.chance = random.Random(seed)
        self.office = FakeNetwork(self.chance, 0, window=window)
        self.n, self.pace, self.iterations = n, pace, iterations
        self.clock = Clock()
        self.boxes = [self.office.box(rank) for rank in range(n)]
        self.replicas = [Numbers(n, pace.colayers) for _ in range(n)]
        self.couriers = [
            Courier(
                Worker(rank, n, pace, summed), self.boxes[rank], n,
                self.replicas[rank], me=f"rank {rank}", clock=self.clock,
            )
            for rank in range(n)
        ]  # fmt: skip
        self.place: dict[int, int | None] = dict.fromkeys(range(n))
        self.alive = set(range(n))

    def train(self, rank: int) -> None:
        courier, machine = self.couriers[rank], self.couriers[rank].machine
        at = self.place[rank]
        if at is None:
            if machine.ended:
                courier._settled()
            elif machine.wanted >= self.iterations:
                machine.end()
            elif courier.advance() is not None:
                self.place[rank] = 0
            return
        payloads = [packed(gradient(rank, machine.at, at, q)) for q in range(self.n)]
        sent = courier.computed(at, payloads)
        self.place[rank] = at + 1
        if not sent or at + 1 == self.pace.colayers:
            courier.finish()
            self.place[rank] = None

    def done(self) -> bool:
        return all(self.couriers[rank].machine.settled for rank in self.alive)

    def kill(self, rank: int) -> None:
        self.alive.discard(rank)
        for other in self.alive:
            self.boxes[other].lost[rank] = "has fallen silent"

    def play(self) -> Crew:
        for _ in range(200_000):
            if self.done():
                break
            rank = self.chance.choice(sorted(self.alive))
            match self.chance.randrange(6):
                case 0:
                    self.train(rank)
                case 1 | 2:
                    self.couriers[rank].step(self.boxes[rank].poll())
                case _:
                    self.office.move()
                    self.clock.now += 1e-3
        assert self.done(), [c.machine.at for c in self.couriers]
        for rank in self.alive:
            self.couriers[rank]._apply()
        states = {self.replicas[rank].copied() for rank in self.alive}
        assert len(states) == 1
        return self


@pytest.mark.parametrize(
    "pace", [Pace(0, 2, 2), Pace(2, 2, 2), Pace(1, 1, 2), Pace(None, 2, 2)], ids=lambda p: p.mode
)
def test_replicas_end_equal(pace: Pace) -> None:
    for seed in range(4):
        crew = Crew(seed, 3, pace, iterations=4).play()
        assert crew.replicas[0].steps >= 4


def test_a_window_of_one_message_is_enough() -> None:
    Crew(0, 3, Pace(1, 2, 2), iterations=3, window=5_000).play()


def test_the_others_go_on_without_one_that_is_lost() -> None:
    crew = Crew(1, 3, Pace(0, 2, 2), iterations=4)
    for _ in range(3):
        crew.train(1)
    crew.kill(1)
    crew.play()
    assert crew.replicas[0].steps >= 4


@pytest.mark.parametrize(("lost", "said"), [(True, "has fallen silent"), (False, "has left")])
def test_where_none_may_be_missing_the_one_that_is_gone_is_named(lost: bool, said: str) -> None:
    crew = Crew(1, 3, Pace(0, 2, 2), iterations=4)
    courier, box = crew.couriers[0], crew.boxes[0]
    courier._presence._survives = False
    courier.step(None)
    if lost:
        box.lost[1] = "has fallen silent"
    else:
        box.gone.add(1)
    with pytest.raises(PeerError, match=f"rank 0: before all had settled, rank 1 {said}; start"):
        courier.step(None)
    assert courier.machine.life_of(1) == 0


def test_who_leaves_after_all_have_settled_is_not_missed() -> None:
    crew = Crew(1, 3, Pace(0, 2, 2), iterations=2).play()
    crew.couriers[0]._presence._survives = False
    crew.boxes[0].lost[1] = "has fallen silent"
    crew.couriers[0].step(None)


def test_bsp_is_the_synchronous_result() -> None:
    crew = Crew(2, 3, Pace(0, 1, 1), iterations=3).play()
    expected = Numbers(3, 1)
    for t in range(3):
        for q in range(3):
            payload = summed(0, q, {(t, w): packed(gradient(w, t, 0, q)) for w in range(3)})
            expected.step([Round(0, q, t, (), (), (), payload)])  # type: ignore[arg-type]
    assert crew.replicas[0].copied() == expected.copied()


@pytest.mark.parametrize(
    ("kind", "payload"),
    [(BEGIN, b"{}"), (BEGIN, b"\xff"), (MORE, b"abc"), (7, b""),
     (BEGIN, struct.pack("<IIQ5i", 4, 5, 0, 5, 0, -2, 0, 0)),
     (BEGIN, struct.pack("<IIQ", 4, 0, 99999999999999))],
)  # fmt: skip
def test_whoever_sends_nonsense_is_named(kind: int, payload: bytes) -> None:
    crew = Crew(0, 2, Pace(0, 1, 1), iterations=1)
    crew.boxes[1].post(0, kind, payload, ids=(0, 0, 1, 0))
    while (letter := crew.boxes[0].poll()) is None:
        crew.office.move()
    with pytest.raises(PeerError, match="rank 0: rank 1 sent a malformed message"):
        crew.couriers[0].step(letter)


def test_who_is_waited_for_too_long_is_named() -> None:
    crew = Crew(0, 2, Pace(0, 1, 1), iterations=2)
    courier = crew.couriers[0]
    courier._timeout = 0.0
    with pytest.raises(PeerError, match="the next iteration after 0 s: waits for rank 1"):
        courier.begin()


def test_one_that_leaves_while_it_is_written_to_is_no_failure() -> None:
    crew = Crew(0, 2, Pace(0, 1, 1), iterations=1)
    box, courier = crew.boxes[0], crew.couriers[0]

    def post(*_: object, **__: object) -> None:
        box.gone.add(1)
        raise PeerError("rank 1 has left")

    box.post = post  # type: ignore[method-assign,assignment]
    courier.step(None)
    courier.step(None)
    assert courier.machine.life_of(1) is None


def test_one_that_cannot_be_written_to_is_a_failure() -> None:
    crew = Crew(0, 2, Pace(0, 1, 1), iterations=1)

    def post(*_: object, **__: object) -> None:
        raise PeerError("rank 1 took nothing")

    crew.boxes[0].post = post  # type: ignore[method-assign,assignment]
    with pytest.raises(PeerError, match="took nothing"):
        crew.couriers[0].step(None)


def opened(n: int, pace: Pace, silence: float) -> list[tuple[Courier, Numbers, Mailbox]]:
    """Couriers with threads, over sockets."""
    store, limits = Switchboard(), Limits(message=1000, window=20_000, silence=silence)

    def one(rank: int) -> tuple[Courier, Numbers, Mailbox]:
        box = open_mailbox(
            store, rank, range(n), interfaces=["lo"], classes=1, encrypted=False, limits=limits,
            seconds=20.0,
        )  # fmt: skip
        replica = Numbers(n, pace.colayers)
        machine = Worker(rank, n, pace, summed)
        courier = Courier(
            machine, box, n, replica, me=f"rank {rank}", timeout=20.0
        )  # fmt: skip
        courier.serve()
        return courier, replica, box

    return in_threads([lambda rank=rank: one(rank) for rank in range(n)])


def test_threads_over_sockets_settle_and_go_on() -> None:
    made = opened(3, Pace(1, 2, 2), silence=20.0)

    def work(courier: Courier, replica: Numbers) -> bytes:
        states = b""
        for _ in range(2):
            trained(courier, 3, 2, 5)
            courier.settle()
            states += replica.copied()
        courier.close()
        return states

    for _, _, box in made:
        box.drop = Mock()  # type: ignore[method-assign]
    states = in_threads([lambda c=c, r=r: work(c, r) for c, r, _ in made])
    assert not any(box.drop.called for _, _, box in made)  # type: ignore[attr-defined]
    assert len(set(states)) == 1
    assert isinstance(states[0], bytes)


def test_who_has_ended_settles_again_with_those_that_only_settled() -> None:
    made = opened(3, Pace(1, 2, 2), silence=20.0)
    ended: set[int] = set()

    def work(courier: Courier, replica: Numbers) -> bytes:
        rank = courier.machine.rank
        for _ in range(0 if rank == 1 else 2):
            trained(courier, 3, 2, 5)
            courier.settle()
        courier.end()
        ended.add(rank)
        courier.stay(lambda: len(ended) == 3)
        courier.close()
        return replica.copied()

    for _, _, box in made:
        box.drop = Mock()  # type: ignore[method-assign]
    states = in_threads([lambda c=c, r=r: work(c, r) for c, r, _ in made])
    assert not any(box.drop.called for _, _, box in made)  # type: ignore[attr-defined]
    assert len(set(states)) == 1


def test_who_ends_long_before_the_others_says_for_whom_it_stays(
    caplog: pytest.LogCaptureFixture,
) -> None:
    crew = Crew(1, 2, Pace(1, 1, 1), iterations=2)
    courier = crew.couriers[0]
    courier._timeout = 0.2
    courier._clock = time.monotonic
    with pytest.raises(PeerError, match="rank 0: may not end after"):
        courier.end(told_s=0.05)
    said = "rank 0: has ended its training after 0 iterations, and makes sums for those that still"
    assert [m for m in caplog.messages if m.startswith(said)] == [f"{said} train: rank 1"]


def test_the_others_go_on_when_a_process_is_gone_without_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One finds out by its connections, and tells the other if that has not yet."""
    made = opened(3, Pace(0, 2, 2), silence=60.0)

    def work(courier: Courier, replica: Numbers, box: Mailbox) -> bytes:
        trained(courier, 3, 2, 3)
        if courier.machine.rank == 1:
            gone = PeerError("the process has ended")
            box.close = lambda *_: box.abandon()  # type: ignore[method-assign,assignment]
            box.next = Mock(side_effect=gone)  # type: ignore[method-assign]
            courier._thread.join(20.0)
            return b""
        trained(courier, 3, 2, 3)
        courier.settle()
        state = replica.copied()
        courier.close()
        return state

    states = in_threads([lambda m=m: work(*m) for m in made])
    assert states[0] == states[2] != b""
    assert made[0][1].steps >= 6
    said = "rank 1 has ended without a word; the others go on without it"
    assert {f"rank 0: {said}", f"rank 2: {said}"} & set(caplog.messages)
