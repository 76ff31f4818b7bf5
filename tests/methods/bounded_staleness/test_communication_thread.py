"""Communication threads on an in-memory network and over sockets."""

from __future__ import annotations

import random
import struct
import time
from unittest.mock import Mock

import pytest

from helpers.communication import NumericReplica, combine, in_threads, pack, train
from helpers.mail import Clock
from helpers.server_simulation import FakeNetwork
from helpers.staleness_simulation import gradient
from wingbeat.errors import PeerError
from wingbeat.methods.bounded_staleness.bound import StalenessBound
from wingbeat.methods.bounded_staleness.communication import CommunicationThread
from wingbeat.methods.bounded_staleness.messages import PieceSum
from wingbeat.methods.bounded_staleness.streams import BEGIN, MORE
from wingbeat.methods.bounded_staleness.worker import Worker
from wingbeat.transport.loopback import Switchboard
from wingbeat.transport.messages import Limits, Mailbox, open_mailbox


class Cluster:
    """Workers without threads, whose next actions are drawn from a seed."""

    def __init__(
        self, seed: int, n: int, bound: StalenessBound, iterations: int, window: int = 1 << 20
    ) -> None:
        self.chance = random.Random(seed)
        self.office = FakeNetwork(self.chance, 0, window=window)
        self.n, self.bound, self.iterations = n, bound, iterations
        self.clock = Clock()
        self.boxes = [self.office.box(rank) for rank in range(n)]
        self.replicas = [NumericReplica(n, bound.colayers) for _ in range(n)]
        self.threads = [
            CommunicationThread(
                Worker(rank, n, bound, combine), self.boxes[rank],
                self.replicas[rank], clock=self.clock,
            )
            for rank in range(n)
        ]  # fmt: skip
        self.place: dict[int, int | None] = dict.fromkeys(range(n))
        self.alive = set(range(n))

    def train(self, rank: int) -> None:
        thread, machine = self.threads[rank], self.threads[rank].machine
        at = self.place[rank]
        if at is None:
            if machine.finished:
                thread._is_drained()
            elif machine.next_iteration >= self.iterations:
                machine.finish()
            elif thread.try_begin_iteration() is not None:
                self.place[rank] = 0
            return
        payloads = [pack(gradient(rank, machine.iteration, at, q)) for q in range(self.n)]
        sent = thread.send_colayer(at, payloads)
        self.place[rank] = at + 1
        if not sent or at + 1 == self.bound.colayers:
            thread.end_iteration()
            self.place[rank] = None

    def done(self) -> bool:
        return all(self.threads[rank].machine.drained for rank in self.alive)

    def kill(self, rank: int) -> None:
        self.alive.discard(rank)
        for other in self.alive:
            self.boxes[other].lost[rank] = "has fallen silent"

    def run(self) -> Cluster:
        for _ in range(200_000):
            if self.done():
                break
            rank = self.chance.choice(sorted(self.alive))
            match self.chance.randrange(6):
                case 0:
                    self.train(rank)
                case 1 | 2:
                    self.threads[rank].process(self.boxes[rank].poll())
                case _:
                    self.office.move()
                    self.clock.now += 1e-3
        assert self.done(), [c.machine.iteration for c in self.threads]
        for rank in self.alive:
            self.threads[rank]._apply_rounds()
        states = {self.replicas[rank].state_bytes() for rank in self.alive}
        assert len(states) == 1
        return self


@pytest.mark.parametrize(
    "bound",
    [
        StalenessBound(0, 2, 2),
        StalenessBound(2, 2, 2),
        StalenessBound(1, 1, 2),
        StalenessBound(None, 2, 2),
    ],
    ids=lambda p: p.mode,
)
def test_replicas_after_training_are_equal(bound: StalenessBound) -> None:
    for seed in range(4):
        cluster = Cluster(seed, 3, bound, iterations=4).run()
        assert cluster.replicas[0].steps >= 4


def test_window_of_one_message_is_sufficient() -> None:
    Cluster(0, 3, StalenessBound(1, 2, 2), iterations=3, window=5_000).run()


def test_training_continues_without_lost_worker() -> None:
    cluster = Cluster(1, 3, StalenessBound(0, 2, 2), iterations=4)
    for _ in range(3):
        cluster.train(1)
    cluster.kill(1)
    cluster.run()
    assert cluster.replicas[0].steps >= 4


@pytest.mark.parametrize(("lost", "said"), [(True, "has fallen silent"), (False, "has left")])
def test_loss_that_is_not_tolerated_names_worker(lost: bool, said: str) -> None:
    cluster = Cluster(1, 3, StalenessBound(0, 2, 2), iterations=4)
    thread, box = cluster.threads[0], cluster.boxes[0]
    thread._detector._tolerates_loss = False
    thread.process(None)
    if lost:
        box.lost[1] = "has fallen silent"
    else:
        box.gone.add(1)
    cluster.clock.now += 1.0
    with pytest.raises(
        PeerError, match=f"rank 0: lost a worker before training ended: rank 1 {said}; start"
    ):
        thread.process(None)
    assert thread.machine.incarnation_of(1) == 0


def test_worker_that_leaves_after_drain_is_not_lost() -> None:
    cluster = Cluster(1, 3, StalenessBound(0, 2, 2), iterations=2).run()
    cluster.threads[0]._detector._tolerates_loss = False
    cluster.boxes[0].lost[1] = "has fallen silent"
    cluster.clock.now += 1.0
    cluster.threads[0].process(None)


def test_bsp_equals_synchronous_training() -> None:
    cluster = Cluster(2, 3, StalenessBound(0, 1, 1), iterations=3).run()
    expected = NumericReplica(3, 1)
    for t in range(3):
        for q in range(3):
            payload = combine(0, q, {(t, w): pack(gradient(w, t, 0, q)) for w in range(3)})
            expected.apply_round([PieceSum(0, q, t, (), (), (), payload)])  # type: ignore[arg-type]
    assert cluster.replicas[0].state_bytes() == expected.state_bytes()


@pytest.mark.parametrize(
    ("kind", "payload"),
    [(BEGIN, b"{}"), (BEGIN, b"\xff"), (MORE, b"abc"), (7, b""),
     (BEGIN, struct.pack("<IIQ5i", 4, 5, 0, 5, 0, -2, 0, 0)),
     (BEGIN, struct.pack("<IIQ", 4, 0, 99999999999999))],
)  # fmt: skip
def test_malformed_packet_names_sender(kind: int, payload: bytes) -> None:
    cluster = Cluster(0, 2, StalenessBound(0, 1, 1), iterations=1)
    cluster.boxes[1].post(0, kind, payload, ids=(0, 0, 1, 0))
    while (letter := cluster.boxes[0].poll()) is None:
        cluster.office.move()
    with pytest.raises(PeerError, match="rank 0: rank 1 sent a malformed message"):
        cluster.threads[0].process(letter)


def test_wait_timeout_names_lagging_worker() -> None:
    cluster = Cluster(0, 2, StalenessBound(0, 1, 1), iterations=2)
    thread = cluster.threads[0]
    thread._timeout = 0.0
    with pytest.raises(PeerError, match="the next iteration after 0 s: waiting for rank 1"):
        thread.begin_iteration()


def test_send_to_worker_that_leaves_is_no_failure() -> None:
    cluster = Cluster(0, 2, StalenessBound(0, 1, 1), iterations=1)
    box, thread = cluster.boxes[0], cluster.threads[0]

    def post(*_: object, **__: object) -> None:
        box.gone.add(1)
        raise PeerError("rank 1 has left")

    box.post = post  # type: ignore[method-assign,assignment]
    thread.process(None)
    cluster.clock.now += 1.0
    thread.process(None)
    assert thread.machine.incarnation_of(1) is None


def test_send_error_raises_peer_error() -> None:
    cluster = Cluster(0, 2, StalenessBound(0, 1, 1), iterations=1)

    def post(*_: object, **__: object) -> None:
        raise PeerError("rank 1 took nothing")

    cluster.boxes[0].post = post  # type: ignore[method-assign,assignment]
    with pytest.raises(PeerError, match="took nothing"):
        cluster.threads[0].process(None)


def open_threads(
    n: int, bound: StalenessBound, silence: float
) -> list[tuple[CommunicationThread, NumericReplica, Mailbox]]:
    """Return started communication threads that are connected by sockets."""
    store, limits = Switchboard(), Limits(message=1000, window=20_000, silence=silence)

    def one(rank: int) -> tuple[CommunicationThread, NumericReplica, Mailbox]:
        box = open_mailbox(
            store, rank, range(n), interfaces=["lo"], classes=1, encrypted=False, limits=limits,
            seconds=20.0,
        )  # fmt: skip
        replica = NumericReplica(n, bound.colayers)
        machine = Worker(rank, n, bound, combine)
        thread = CommunicationThread(
            machine, box, replica, timeout=20.0
        )  # fmt: skip
        thread.start()
        return thread, replica, box

    return in_threads([lambda rank=rank: one(rank) for rank in range(n)])


def test_threads_over_sockets_drain_and_resume() -> None:
    made = open_threads(3, StalenessBound(1, 2, 2), silence=20.0)

    def work(thread: CommunicationThread, replica: NumericReplica) -> bytes:
        states = b""
        for _ in range(2):
            train(thread, 3, 2, 5)
            thread.finish()
            thread.resume()
            states += replica.state_bytes()
        thread.close()
        return states

    for _, _, box in made:
        box.drop = Mock()  # type: ignore[method-assign]
    states = in_threads([lambda c=c, r=r: work(c, r) for c, r, _ in made])
    assert not any(box.drop.called for _, _, box in made)  # type: ignore[attr-defined]
    assert len(set(states)) == 1
    assert isinstance(states[0], bytes)


def test_finished_worker_drains_again_with_resumed_workers() -> None:
    made = open_threads(3, StalenessBound(1, 2, 2), silence=20.0)
    ended: set[int] = set()

    def work(thread: CommunicationThread, replica: NumericReplica) -> bytes:
        rank = thread.machine.rank
        for _ in range(0 if rank == 1 else 2):
            train(thread, 3, 2, 5)
            thread.finish()
            thread.resume()
        thread.finish()
        ended.add(rank)
        thread.serve_until(ended.__contains__)
        thread.close()
        return replica.state_bytes()

    for _, _, box in made:
        box.drop = Mock()  # type: ignore[method-assign]
    states = in_threads([lambda c=c, r=r: work(c, r) for c, r, _ in made])
    assert not any(box.drop.called for _, _, box in made)  # type: ignore[attr-defined]
    assert len(set(states)) == 1


def test_finished_worker_does_not_wait_for_one_that_was_killed_after_its_drain() -> None:
    made = open_threads(3, StalenessBound(1, 2, 2), silence=20.0)
    ended: set[int] = set()

    def work(thread: CommunicationThread, box: Mailbox) -> frozenset[int]:
        thread._timeout = 10.0
        train(thread, 3, 2, 5)
        thread.finish()
        if thread.machine.rank == 1:  # before it has published its end
            box.close = lambda *_: box.abandon()  # type: ignore[method-assign,assignment]
            thread.close()
            return frozenset()
        ended.add(thread.machine.rank)
        thread.serve_until(ended.__contains__)
        lost = thread.lost_workers()
        thread.close()
        return lost

    lost = in_threads([lambda c=c, b=b: work(c, b) for c, _, b in made])
    assert lost[0] >= {1} <= lost[2]


def test_finished_worker_logs_workers_it_waits_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = Cluster(1, 2, StalenessBound(1, 1, 1), iterations=2)
    thread = cluster.threads[0]
    thread._timeout = 0.2
    thread._clock = time.monotonic
    with pytest.raises(PeerError, match="rank 0: cannot finish after"):
        thread.finish(log_after_s=0.05)
    said = "rank 0: finished training after 0 iterations, and sums gradients for workers that still"
    assert [m for m in caplog.messages if m.startswith(said)] == [f"{said} train: rank 1"]


def test_training_continues_when_process_exits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One worker detects it by its connections, and the view change tells the other."""
    made = open_threads(3, StalenessBound(0, 2, 2), silence=60.0)

    def work(thread: CommunicationThread, replica: NumericReplica, box: Mailbox) -> bytes:
        train(thread, 3, 2, 3)
        if thread.machine.rank == 1:
            gone = PeerError("the process has ended")
            box.close = lambda *_: box.abandon()  # type: ignore[method-assign,assignment]
            box.next = Mock(side_effect=gone)  # type: ignore[method-assign]
            thread._thread.join(20.0)
            return b""
        train(thread, 3, 2, 3)
        thread.finish()
        thread.resume()
        state = replica.state_bytes()
        thread.close()
        return state

    states = in_threads([lambda m=m: work(*m) for m in made])
    assert states[0] == states[2] != b""
    assert made[0][1].steps >= 6
    said = (
        "rank 1 has ended unexpectedly: its connections are closed; the others continue without it "
        "[event=lost rank=1 incarnation=0]"
    )
    assert {f"rank 0: {said}", f"rank 2: {said}"} & set(caplog.messages)
