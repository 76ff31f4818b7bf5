"""What the training thread is blocked on is counted, and recorded where events are."""

from __future__ import annotations

import time
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from wingbeat.engine.runtime import Runtime
from wingbeat.errors import PeerError
from wingbeat.observe.events import stream
from wingbeat.observe.meter import Meter
from wingbeat.schedules.events import Await, Wait

WAIT_S = 0.01


class _Slow:
    """A bucket, and an intent exchange, that block; and may fail."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.index, self.handle = fails, 0, self
        self.received = self.settled = 0

    def _wait(self) -> str:
        time.sleep(WAIT_S)
        if self.fails:
            raise PeerError("rank 1 is gone")
        return "heard"

    def wait_received(self) -> None:
        self.received += 1
        self._wait()

    def settle(self) -> None:
        self.settled += 1
        self._wait()

    def await_all(self) -> str:
        return self._wait()


def _runtime(slow: _Slow) -> Runtime:
    """A runtime whose schedule yields the command that it is given as an event."""

    def react(command: Any) -> Generator[Any, Any, None]:
        yield command

    schedule: Any = SimpleNamespace(react=react)
    parts: Any = SimpleNamespace(buckets=[slow], preserves_gradients=lambda _: False)
    unused = cast(Any, None)
    return Runtime(
        schedule, unused, parts, unused, parts, cast(Any, slow), unused, meter=Meter("x")
    )


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    "command", [Wait(0, whole=False), Wait(0, whole=False, read_only=True), Await()]
)
def test_a_wait_is_counted_however_it_ends(command: Any, fails: bool) -> None:
    slow = _Slow(fails)
    runtime = _runtime(slow)
    stream.start(worker=0)
    try:
        if fails:
            with pytest.raises(PeerError):
                runtime.dispatch(command)
        else:
            runtime.dispatch(command)
    finally:
        events = stream.stop()
    assert runtime.meter.waited_ns >= 1e9 * WAIT_S
    [event] = events
    assert (event.what, event.bucket) == ("wait", -1 if isinstance(command, Await) else 0)
    assert event.end_ns - event.begin_ns == runtime.meter.waited_ns


def test_a_read_only_wait_does_not_wait_for_forwarding() -> None:
    slow = _Slow()
    runtime = _runtime(slow)
    runtime.dispatch(cast(Any, Wait(0, whole=False, read_only=True)))
    runtime.dispatch(cast(Any, Wait(0, whole=False)))
    assert (slow.received, slow.settled) == (1, 1)
