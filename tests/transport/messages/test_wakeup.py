"""One thread rings, another hears."""

from __future__ import annotations

import select
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from wingbeat.transport.messages.zeromq import Alarm


@pytest.fixture
def alarm() -> Iterator[Alarm]:
    made = Alarm()
    yield made
    made.close()


def rung(alarm: Alarm, seconds: float = 0.0) -> bool:
    return bool(select.select([alarm.fileno()], [], [], seconds)[0])


def test_rung_many_times_it_is_heard_once(alarm: Alarm) -> None:
    assert not rung(alarm)
    for _ in range(100_000):  # more than a pipe holds
        alarm.ring()
    assert rung(alarm)
    alarm.heard()
    assert not rung(alarm)
    alarm.ring()
    assert rung(alarm)


def test_what_nobody_rang_can_be_heard(alarm: Alarm) -> None:
    alarm.heard()
    alarm.ring()
    alarm.heard()
    alarm.heard()
    assert not rung(alarm)


def test_closed_it_is_silent(alarm: Alarm) -> None:
    alarm.ring()
    alarm.close()
    alarm.close()
    alarm.ring()
    alarm.heard()


def test_no_ring_of_another_thread_is_missed(alarm: Alarm) -> None:
    """Each waits for the other: one that is lost hangs both, or rather ends in the assertion."""
    answers = Alarm()

    def other() -> None:
        for _ in range(2000):
            if not rung(alarm, 10.0):
                return
            alarm.heard()
            answers.ring()

    thread = threading.Thread(target=other)
    thread.start()
    for _ in range(2000):
        alarm.ring()
        assert rung(answers, 10.0)
        answers.heard()
    thread.join()
    answers.close()


def test_threads_may_ring_and_close_at_the_same_time() -> None:
    for _ in range(50):
        alarm = Alarm()
        start = threading.Barrier(4)

        def ring(alarm: Alarm = alarm, start: threading.Barrier = start) -> bool:
            start.wait()
            for _ in range(20):
                alarm.ring()
                alarm.heard()
            return True

        with ThreadPoolExecutor(3) as threads:
            ringing = [threads.submit(ring) for _ in range(3)]
            start.wait()
            alarm.close()
            assert all(each.result() for each in ringing)
