"""Workers over sockets that are killed, missed, and come back by pulling parameters."""

from __future__ import annotations

import threading
import time
from unittest.mock import Mock

import pytest

from helpers.couriers import Numbers, summed, trained
from wingbeat.errors import PeerError, RendezvousError
from wingbeat.methods.bounded_staleness.arriving import Arrived, come
from wingbeat.methods.bounded_staleness.courier import Courier
from wingbeat.methods.bounded_staleness.pace import Pace
from wingbeat.methods.bounded_staleness.worker import Worker
from wingbeat.transport.loopback import Switchboard
from wingbeat.transport.messages import Limits

K = 2
LIMITS = Limits(message=1000, window=20_000, silence=60.0)


class Life:
    """One life of a worker, in a thread: it trains until ``iterations``, or until it is killed."""

    def __init__(self, store: Switchboard, rank: int, n: int, pace: Pace, iterations: int) -> None:
        self.rank, self.n, self.pace, self.iterations = rank, n, pace, iterations
        self._store = store
        self.killed, self.error = threading.Event(), ""
        self.began: list[int] = []
        self.state, self.pulls, self.life = b"", 0, -1
        self._arrived: Arrived | None = None
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
        self._arrived = arrived = come(
            self._store, self.rank, self.n, room="t", interfaces=["lo"],
            encrypted=self.pace.mode == "BSP", limits=LIMITS, patience=2.0, seconds=20.0,
        )  # fmt: skip
        self.life = arrived.life
        machine = Worker(self.rank, self.n, self.pace, summed, life=arrived.life)
        replica = Numbers(self.n, self.pace.colayers)
        courier = Courier(
            machine, arrived.mailbox, self.n, replica,
            me=f"rank {self.rank}", timeout=20.0, lanes=arrived.lanes,
            attendance=arrived.attendance,
        )  # fmt: skip
        courier.serve()
        while not self.began or self.began[-1] < self.iterations - 1:
            if self.killed.is_set():
                self._die(courier)
            self.began += trained(courier, self.n, K, 1)
            time.sleep(0.01)
        courier.settle()
        self.state, self.pulls = replica.copied(), replica.pulls
        courier.close()

    def _die(self, courier: Courier) -> None:
        """Vanish without a word, as a process that is killed does."""
        assert self._arrived is not None
        box = self._arrived.mailbox
        box.close = lambda *_: box.abandon()  # type: ignore[method-assign,assignment]
        box.next = Mock(side_effect=PeerError("killed"))  # type: ignore[method-assign]
        courier._thread.join(20.0)
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


def killed_and_back(pace: Pace, kills: int, n: int, gap: int) -> list[Life]:
    store, iterations = Switchboard(), (kills + 2) * gap
    lives = [Life(store, rank, n, pace, iterations) for rank in range(n)]
    for kill in range(kills):
        victim = (kill + 1) % n
        lives[victim].until(kill * gap + 2)
        lives[victim].killed.set()
        lives[victim].join()
        old = lives[victim]
        lives[victim] = Life(store, victim, n, pace, iterations)
        lives[victim].until(old.began[-1] + 1)
        assert not lives[victim].error
    for life in lives:
        life.join()
        assert not life.error, life.error
    assert len({life.state for life in lives}) == 1
    return lives


@pytest.mark.parametrize("pace", [Pace(2, 1, 2), Pace(0, 2, 2)], ids=lambda pace: pace.mode)
def test_a_killed_worker_comes_back_by_pulling_parameters(pace: Pace) -> None:
    lives = killed_and_back(pace, kills=2, n=3, gap=15)
    assert [life.life for life in lives] == [0, 1, 1]
    assert lives[1].pulls >= 1


@pytest.mark.slow
def test_twenty_kills_in_one_run() -> None:
    lives = killed_and_back(Pace(2, 1, 2), kills=20, n=3, gap=15)
    assert sum(life.life for life in lives) == 20
