"""Threads that are used again: as many as there is work at once, and none for long after."""

from __future__ import annotations

import os
import signal
import threading
import weakref

import pytest
import torch

from helpers.waiting import PATIENCE, until
from wingbeat.collectives import Collectives, executor
from wingbeat.collectives.threads import ThreadPool
from wingbeat.transport import loopback
from wingbeat.transport.world import World
from wingbeat.types import Group


def test_idle_thread_is_reused() -> None:
    threads, seen = ThreadPool("test-again", kept_s=PATIENCE), set()
    for _ in range(50):
        done = threading.Event()

        def work(done: threading.Event = done) -> None:
            seen.add(threading.get_ident())
            done.set()

        threads.start(work)
        assert done.wait(PATIENCE)
        until(lambda: threads._free == 1)
    assert len(seen) == 1
    assert threading.active_count() < 50


def test_work_never_waits_for_other_work() -> None:
    threads, together = ThreadPool("test-together", kept_s=0.1), threading.Barrier(9)
    for _ in range(2):
        for _ in range(8):
            threads.start(lambda: (together.wait(PATIENCE), None)[1])
        together.wait(PATIENCE)  # breaks unless all eight run at once


def test_a_thread_without_work_ends() -> None:
    threads, done = ThreadPool("test-ends", kept_s=0.01), threading.Event()
    threads.start(done.set)
    assert done.wait(PATIENCE)
    until(lambda: not any(t.name.startswith("test-ends") for t in threading.enumerate()))


def test_a_waiting_thread_keeps_no_work_alive() -> None:
    class Work:
        def __call__(self) -> None:
            pass

    threads, work = ThreadPool("test-alive", kept_s=PATIENCE), Work()
    threads.start(work)
    kept = weakref.ref(work)
    del work
    until(lambda: kept() is None)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_has_its_own_threads() -> None:
    def body(world: World) -> list[float]:
        buffer = torch.ones(2)
        with world.open_group(Group((0, 1))) as members:
            Collectives(members).all_reduce(buffer).wait()
        return buffer.tolist()

    assert loopback.run(loopback.worlds(2, timeout=PATIENCE), body) == [[2.0] * 2] * 2
    until(lambda: executor.executor_threads._free > 0)
    child = os.fork()
    if child == 0:
        right = False
        signal.alarm(int(PATIENCE))  # a child that hangs dies of it
        try:
            right = loopback.run(loopback.worlds(2, timeout=PATIENCE), body) == [[2.0] * 2] * 2
        finally:
            os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0
