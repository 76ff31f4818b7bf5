"""Workers over sockets that are killed, detected as lost, and join again by pulling parameters."""

from __future__ import annotations

import threading
import time
from unittest.mock import Mock

import pytest

from helpers.communication import NumericReplica, combine, train
from wingbeat.errors import PeerError, RendezvousError
from wingbeat.methods.bounded_staleness.bound import StalenessBound
from wingbeat.methods.bounded_staleness.communication import CommunicationThread
from wingbeat.methods.bounded_staleness.membership import JoinedWorker, join_workers
from wingbeat.methods.bounded_staleness.worker import Worker
from wingbeat.transport.loopback import Switchboard
from wingbeat.transport.messages import Limits

K = 2
LIMITS = Limits(message=1000, window=20_000, silence=60.0)


class Incarnation:
    """One incarnation of a worker in a thread; it trains until ``iterations`` or is killed."""

    def __init__(
        self, store: Switchboard, rank: int, n: int, bound: StalenessBound, iterations: int
    ) -> None:
        self.rank, self.n, self.bound, self.iterations = rank, n, bound, iterations
        self._store = store
        self.killed, self.error = threading.Event(), ""
        self.began: list[int] = []
        self.state, self.pulls, self.incarnation = b"", 0, -1
        self._joined: JoinedWorker | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._train()
        except (PeerError, RendezvousError) as error:
            self.error = str(error)
        except _Killed:
            pass

    def _train(self) -> None:
        self._joined = joined = join_workers(
            self._store, self.rank, self.n, namespace="t", interfaces=["lo"],
            encrypted=self.bound.mode == "BSP", limits=LIMITS, suspect_after=2.0, seconds=20.0,
        )  # fmt: skip
        self.incarnation = joined.incarnation
        machine = Worker(self.rank, self.n, self.bound, combine, incarnation=joined.incarnation)
        replica = NumericReplica(self.n, self.bound.colayers)
        thread = CommunicationThread(
            machine, joined.mailbox, replica, timeout=20.0, streams=joined.streams,
            membership=joined.membership,
        )  # fmt: skip
        thread.start()
        while not self.began or self.began[-1] < self.iterations - 1:
            if self.killed.is_set():
                self._die(thread)
            self.began += train(thread, self.n, K, 1)
            time.sleep(0.01)
        thread.finish()
        thread.resume()
        self.state, self.pulls = replica.state_bytes(), replica.pulls
        thread.close()

    def _die(self, thread: CommunicationThread) -> None:
        """Stop without a message, as a killed process does."""
        assert self._joined is not None
        box = self._joined.mailbox
        box.close = lambda *_: box.abandon()  # type: ignore[method-assign,assignment]
        box.next = Mock(side_effect=PeerError("killed"))  # type: ignore[method-assign]
        thread._thread.join(20.0)
        raise _Killed

    def until(self, iteration: int) -> None:
        deadline = time.monotonic() + 30.0
        while not self.error and (not self.began or self.began[-1] < iteration):
            assert time.monotonic() < deadline, (self.rank, self.began[-3:])
            time.sleep(0.01)

    def join(self) -> None:
        self._thread.join(40.0)
        assert not self._thread.is_alive(), f"rank {self.rank} waits for ever: {self.began[-3:]}"


class _Killed(Exception):
    pass


def killed_and_back(bound: StalenessBound, kills: int, n: int, gap: int) -> list[Incarnation]:
    store, iterations = Switchboard(), (kills + 2) * gap
    incarnations = [Incarnation(store, rank, n, bound, iterations) for rank in range(n)]
    for kill in range(kills):
        victim = (kill + 1) % n
        incarnations[victim].until(kill * gap + 2)
        incarnations[victim].killed.set()
        incarnations[victim].join()
        old = incarnations[victim]
        incarnations[victim] = Incarnation(store, victim, n, bound, iterations)
        incarnations[victim].until(old.began[-1] + 1)
        assert not incarnations[victim].error
    for incarnation in incarnations:
        incarnation.join()
        assert not incarnation.error, incarnation.error
    assert len({incarnation.state for incarnation in incarnations}) == 1
    return incarnations


@pytest.mark.parametrize(
    "bound", [StalenessBound(2, 1, 2), StalenessBound(0, 2, 2)], ids=lambda bound: bound.mode
)
def test_killed_worker_rejoins_by_pulling_parameters(bound: StalenessBound) -> None:
    incarnations = killed_and_back(bound, kills=2, n=3, gap=15)
    assert [incarnation.incarnation for incarnation in incarnations] == [0, 1, 1]
    assert incarnations[1].pulls >= 1


@pytest.mark.slow
def test_twenty_kills_leave_replicas_equal() -> None:
    incarnations = killed_and_back(StalenessBound(2, 1, 2), kills=20, n=3, gap=15)
    assert sum(incarnation.incarnation for incarnation in incarnations) == 20
