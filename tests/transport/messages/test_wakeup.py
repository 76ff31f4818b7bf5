"""One thread rings, another hears."""

from __future__ import annotations

import select
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from wingbeat.transport.messages.zeromq import Wakeup


@pytest.fixture
def wakeup() -> Iterator[Wakeup]:
    made = Wakeup()
    yield made
    made.close()


def rung(wakeup: Wakeup, seconds: float = 0.0) -> bool:
    return bool(select.select([wakeup.fileno()], [], [], seconds)[0])


def test_wakeup_set_many_times_is_readable_once(wakeup: Wakeup) -> None:
    assert not rung(wakeup)
    for _ in range(100_000):  # more than a pipe holds
        wakeup.set()
    assert rung(wakeup)
    wakeup.clear()
    assert not rung(wakeup)
    wakeup.set()
    assert rung(wakeup)


def test_wakeup_that_is_not_set_can_be_cleared(wakeup: Wakeup) -> None:
    wakeup.clear()
    wakeup.set()
    wakeup.clear()
    wakeup.clear()
    assert not rung(wakeup)


def test_closed_wakeup_does_nothing(wakeup: Wakeup) -> None:
    wakeup.set()
    wakeup.close()
    wakeup.close()
    wakeup.set()
    wakeup.clear()


def test_set_of_another_thread_is_not_missed(wakeup: Wakeup) -> None:
    """Each waits for the other: one that is lost hangs both, or rather ends in the assertion."""
    answers = Wakeup()

    def other() -> None:
        for _ in range(2000):
            if not rung(wakeup, 10.0):
                return
            wakeup.clear()
            answers.set()

    thread = threading.Thread(target=other)
    thread.start()
    for _ in range(2000):
        wakeup.set()
        assert rung(answers, 10.0)
        answers.clear()
    thread.join()
    answers.close()


def test_set_and_close_may_run_at_the_same_time() -> None:
    for _ in range(50):
        wakeup = Wakeup()
        start = threading.Barrier(4)

        def ring(wakeup: Wakeup = wakeup, start: threading.Barrier = start) -> bool:
            start.wait()
            for _ in range(20):
                wakeup.set()
                wakeup.clear()
            return True

        with ThreadPoolExecutor(3) as threads:
            ringing = [threads.submit(ring) for _ in range(3)]
            start.wait()
            wakeup.close()
            assert all(each.result() for each in ringing)
