"""Work beside training: in the order in which it came, one piece at a time."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch

from wingbeat import compression
from wingbeat.codecs import Coding, make
from wingbeat.codecs.coding import Region
from wingbeat.collectives import Collectives, Encoded
from wingbeat.collectives.encoded import Gathered
from wingbeat.collectives.handle import Handle
from wingbeat.collectives.threads import SerialQueue, ThreadPool
from wingbeat.errors import PeerError
from wingbeat.transport import loopback
from wingbeat.transport.world import World
from wingbeat.types import Span

PATIENCE = 20.0


def test_serial_queue_runs_in_order() -> None:
    beside, done, over = SerialQueue(ThreadPool("test-turn")), [], threading.Event()
    at_once = threading.Semaphore(1)

    def work(number: int) -> None:
        assert at_once.acquire(blocking=False)
        done.append(number)
        at_once.release()
        if number == 99:
            over.set()

    for number in range(100):
        beside.start(lambda number=number: work(number))
    assert over.wait(PATIENCE)
    assert done == list(range(100))


def test_failing_callable_does_not_stop_the_queue(caplog: pytest.LogCaptureFixture) -> None:
    beside, over = SerialQueue(ThreadPool("test-fails")), threading.Event()

    def fails() -> None:
        raise ArithmeticError("no such thing")

    beside.start(fails)
    beside.start(over.set)
    assert over.wait(PATIENCE)
    assert "no such thing" in caplog.text


class Rows:
    """What is to be done with rows, as a test says."""

    def __init__(self, *outcomes: Any) -> None:
        self.outcomes = list(outcomes)
        self.threads: list[int] = []
        self.added = threading.Event()

    def add(self) -> None:
        self.threads.append(threading.get_ident())
        outcome = self.outcomes.pop(0) if self.outcomes else None
        self.added.set()
        if outcome is not None:
            raise outcome


def test_gathered_rows_are_added_in_the_background_before_a_wait() -> None:
    rows = Rows()
    handle = Gathered(Handle([]), rows, SerialQueue(ThreadPool("test-beside")))
    assert rows.added.wait(PATIENCE)
    handle.wait()
    assert len(rows.threads) == 1
    assert rows.threads[0] != threading.get_ident()


@pytest.mark.parametrize("error", [PeerError("rank 1 sent nonsense"), MemoryError("no room")])
def test_failure_in_the_background_is_raised_by_wait(error: Exception) -> None:
    rows = Rows(error, error, error)
    handle = Gathered(Handle([]), rows, SerialQueue(ThreadPool("test-told")))
    assert rows.added.wait(PATIENCE)
    for _ in range(2):
        with pytest.raises(type(error), match=str(error)):
            handle.wait()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sum_in_the_background_is_the_same(momentum: float) -> None:
    """Many at once, each with its own buffer, waited for in another order than they were begun."""
    numel, count = 5000, 12
    coding = Coding(
        [Region(Span(0, numel), make(compression.TopK(density=0.02, momentum=momentum)))]
    )

    def body(world: World, beside: bool) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(world.rank)
        buffers = [torch.randn(numel, generator=generator) for _ in range(count)]
        kept = [torch.zeros(numel) for _ in range(count)]
        moving = [torch.zeros(numel) if momentum else None for _ in range(count)]
        collectives = Collectives(world)
        handles = [
            collectives.all_gather_sum(
                buffer, wire=Encoded(coding, residual), velocity=velocity, beside=beside
            )
            for buffer, residual, velocity in zip(buffers, kept, moving, strict=True)
        ]
        for handle in reversed(handles):
            handle.wait()
        return [*buffers, *kept]

    expected = loopback.run(loopback.worlds(3), lambda world: body(world, False))
    found = loopback.run(loopback.worlds(3), lambda world: body(world, True))
    for one, other in zip(expected, found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_failed_peer_is_named_with_rows_added_in_the_background() -> None:
    first, _ = loopback.worlds(2, timeout=0.1)
    coding = Coding([Region(Span(0, 50), make(compression.Half()))])
    handle = Collectives(first).all_gather_sum(torch.ones(50), wire=Encoded(coding), beside=True)
    for _ in range(2):
        with pytest.raises(PeerError, match="rank 1 failed during all-gather"):
            handle.wait()


def test_forked_child_has_its_own_queue() -> None:
    beside, over = SerialQueue(ThreadPool("test-fork")), threading.Event()
    hold = threading.Event()
    beside.start(lambda: (hold.wait(PATIENCE), None)[1])
    child = os.fork()
    if child == 0:  # the thread that works is the parent's
        beside.reset_after_fork()
        done = threading.Event()
        beside.start(done.set)
        os._exit(0 if done.wait(PATIENCE) else 1)
    hold.set()
    beside.start(over.set)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    assert over.wait(PATIENCE)
