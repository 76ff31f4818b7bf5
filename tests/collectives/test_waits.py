"""Long waits in collectives: logged, and cut short only if the peer is gone or waits itself."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.mail import Clock
from wingbeat.collectives import waits
from wingbeat.collectives.waits import CurrentWait, WaitMonitor
from wingbeat.transport import failures
from wingbeat.transport.failures import MAX_WAIT_FACTOR, WaitLog, last_awaited, publish_wait
from wingbeat.transport.loopback import Switchboard

TIMEOUT = 40.0


class Rig:
    """A thread of rank 0 that waits for rank 1, by a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.store = Clock(), Switchboard()
        self.alive = {1, 2}
        self.aborted: list[CurrentWait] = []
        monkeypatch.setattr("wingbeat.collectives.waits.time.monotonic", self.clock)
        monkeypatch.setattr(waits, "WaitLog", lambda me, what: WaitLog(me, what, self.clock))
        monkeypatch.setattr(failures, "is_alive", lambda store, rank: rank in self.alive)
        self.waiting: Any = None
        self.watch = WaitMonitor(self.store, 0, TIMEOUT, self)

    def abort_waits(self) -> None:
        self.aborted.append(self.waiting)

    def wait(self) -> None:
        self.waiting = CurrentWait(1, "all-reduce of bucket 3", self)  # type: ignore[arg-type]
        self.watch.check()

    def pass_(self, seconds: float) -> None:
        for _ in range(round(seconds)):
            self.clock.now += 1.0
            self.watch.check()


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def test_wait_for_a_live_peer_continues_and_is_logged_after_30_s(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.wait()
    rig.pass_(29)
    assert not caplog.records
    rig.pass_(150)
    assert not rig.aborted
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0].startswith("rank 0: has waited for all-reduce of bucket 3 of rank 1 for 3")
    assert 3 <= len(lines) <= 6
    rig.waiting = None
    rig.watch.check()
    assert rig.store.get("waiting/0", 0.0) == "", "it waits no more"


def test_wait_for_a_peer_without_a_sign_ends_after_the_timeout(rig: Rig) -> None:
    rig.alive.clear()
    rig.wait()
    rig.pass_(TIMEOUT)
    assert not rig.aborted
    rig.pass_(1)
    assert len(rig.aborted) == 1
    assert rig.watch.why == "Timed out: no sign of life for 40 s"
    rig.pass_(10)
    assert len(rig.aborted) == 1, "once"


def test_wait_ends_a_timeout_after_the_last_sign(rig: Rig) -> None:
    rig.wait()
    rig.pass_(100)
    rig.alive.clear()
    rig.pass_(TIMEOUT - 6)
    assert not rig.aborted
    rig.pass_(8)
    assert rig.aborted


def test_wait_for_a_live_blocked_peer_ends_after_ten_timeouts(rig: Rig) -> None:
    rig.wait()
    rig.pass_(MAX_WAIT_FACTOR * TIMEOUT)
    assert not rig.aborted
    rig.pass_(1)
    assert rig.aborted
    assert rig.watch.why.startswith("Timed out: it is alive, but blocked elsewhere for 10 times")


def test_peers_that_wait_for_each_other_end_after_the_timeout(rig: Rig) -> None:
    """As after calls that differ between ranks: both live."""
    rig.wait()
    publish_wait(rig.store, 1, 2)
    publish_wait(rig.store, 2, 0)
    rig.pass_(TIMEOUT + 1)
    assert rig.aborted


def test_wait_for_a_peer_that_waits_for_an_evaluating_one_continues(rig: Rig) -> None:
    rig.wait()
    publish_wait(rig.store, 1, 2)
    rig.pass_(3 * TIMEOUT)
    assert not rig.aborted


def test_wait_is_published_after_a_while_and_the_next_one_is_another(rig: Rig) -> None:
    rig.wait()
    rig.pass_(TIMEOUT / 2 - 1)
    assert not rig.store.has("waiting/0")
    rig.pass_(2)
    assert rig.store.get("waiting/0", 0.0) == "1"
    rig.wait()
    assert rig.store.get("waiting/0", 0.0) == ""
    rig.pass_(TIMEOUT / 2 - 1)
    assert not rig.aborted
    assert rig.store.get("waiting/0", 0.0) == ""


@pytest.mark.parametrize("said", ["x", "-1", "1e3", "9" * 30, "٣"])
def test_malformed_wait_is_ignored(said: str) -> None:
    store = Switchboard()
    store.set("waiting/1", said)
    assert last_awaited(store, 0, 1) == 1


def test_cycle_without_this_rank_has_no_end() -> None:
    store = Switchboard()
    publish_wait(store, 1, 2)
    publish_wait(store, 2, 1)
    assert last_awaited(store, 0, 1) is None


def test_wait_in_a_group_ends_after_seconds_if_the_peer_does_not_respond(rig: Rig) -> None:
    rig.watch = WaitMonitor(None, 0, TIMEOUT, rig, lambda rank: rank in rig.alive)
    rig.wait()
    rig.pass_(20)
    assert not rig.aborted, "a live peer may compute for long"
    rig.alive.clear()
    rig.pass_(waits.SILENT_S)
    assert len(rig.aborted) == 1
    assert rig.watch.why == "Timed out: no sign of life for 3.0 s"


def test_wait_in_a_group_for_a_live_peer_ends_after_the_timeout(rig: Rig) -> None:
    rig.watch = WaitMonitor(None, 0, TIMEOUT, rig, lambda rank: rank in rig.alive)
    rig.wait()
    rig.pass_(TIMEOUT)
    assert not rig.aborted
    rig.pass_(1)
    assert rig.watch.why == "Timed out: nothing arrived for 40 s"
