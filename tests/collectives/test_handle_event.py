"""A latch opens once, for all who wait and all who come later."""

from __future__ import annotations

import threading

from wingbeat.collectives.handle import OneShotEvent

PATIENCE = 20.0


def test_open_event_ends_all_waits() -> None:
    latch, passed = OneShotEvent(), []
    threads = [
        threading.Thread(target=lambda n=n: (latch.wait(), passed.append(n)), daemon=True)
        for n in range(5)
    ]
    for thread in threads:
        thread.start()
    threads[0].join(0.02)
    assert not passed
    assert not latch.is_set
    latch.set()
    latch.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(passed) == list(range(5))


def test_wait_for_an_open_event_returns_at_once() -> None:
    latch = OneShotEvent()
    latch.set()
    latch.wait()
    latch.wait()
    assert latch.is_set


def test_wait_ends_after_its_timeout_and_returns_the_state() -> None:
    latch = OneShotEvent()
    assert not latch.wait(0.01)
    latch.set()
    assert latch.wait(0.01)
    assert latch.wait(0)
