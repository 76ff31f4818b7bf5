"""The rules of failure detection, in virtual time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from wingbeat.transport.detector import (
    ENDED,
    LEFT,
    RECONNECT_S,
    TIMEOUT_FACTOR,
    AdaptiveTimeout,
    Deadlines,
    Failed,
    Failure,
    FailureDetector,
)

# -- failed peers of a mailbox -------------------------------------------------------------


class Peers:
    """What a mailbox knows about its peers, by a clock of the test."""

    def __init__(self) -> None:
        self.now = 100.0
        self.left: set[int] = set()
        self.lost: dict[int, str] = {}
        self.closed_at: dict[int, float] = {}
        self.polls = 0

    def unconnected(self) -> dict[int, float]:
        self.polls += 1
        return {peer: self.now - at for peer, at in self.closed_at.items()}

    def clock(self) -> float:
        return self.now


def test_peer_without_connections_has_ended_after_a_second() -> None:
    peers = Peers()
    detector = FailureDetector(peers, peers.clock)
    peers.closed_at[1] = peers.now
    seen = {}
    for _ in range(30):
        peers.now += 0.05
        seen[round(peers.now - 100.0, 2)] = detector.failed()
    ended = [seconds for seconds, failed in seen.items() if failed == {1: ENDED}]
    assert RECONNECT_S < min(ended) <= RECONNECT_S + 0.3
    assert all(seen[seconds] == {} for seconds in seen if seconds < min(ended))


def test_peer_that_connects_again_has_not_failed() -> None:
    peers = Peers()
    detector = FailureDetector(peers, peers.clock)
    for _ in range(10):
        peers.closed_at[1] = peers.now
        for _ in range(3):
            peers.now += 0.3
            assert detector.failed() == {}
        peers.closed_at.clear()
        peers.now += 0.3
        assert detector.failed() == {}


def test_closed_connections_are_polled_a_few_times_a_second() -> None:
    """Each poll takes a lock of the network thread, and messages may be frequent."""
    peers = Peers()
    detector = FailureDetector(peers, peers.clock)
    for _ in range(1000):
        peers.now += 0.001
        detector.failed()
    assert 3 <= peers.polls <= 5


def test_first_rule_that_applies_is_the_reason() -> None:
    peers = Peers()
    detector = FailureDetector(peers, peers.clock)
    peers.closed_at |= dict.fromkeys((1, 2, 3), 0.0)
    peers.lost |= dict.fromkeys((1, 2), "has been silent for 5 s")
    peers.left.add(1)
    silent = Failed(Failure.SILENT, "has been silent for 5 s")
    assert detector.failed() == {1: LEFT, 2: silent, 3: ENDED}


def test_disconnect_of_a_peer_that_was_not_reached_is_ignored_until_it_connects() -> None:
    peers, reached = Peers(), {1}
    detector = FailureDetector(peers, peers.clock, lambda: reached)
    peers.closed_at |= {1: 100.0, 2: 100.0}
    for _ in range(40):
        peers.now += 0.1
        detector.failed()
        reached.clear()  # also 1 is not reached any more, since its connections have closed
    assert detector.failed() == {1: ENDED}
    peers.closed_at.clear()
    reached |= {1, 2}
    peers.now += 0.3
    assert detector.failed() == {}
    peers.closed_at[2] = peers.now
    for _ in range(12):
        peers.now += 0.1
        detector.failed()
    peers.now += 0.3
    assert detector.failed() == {2: ENDED}


# -- adaptive timeouts ---------------------------------------------------------------------


def test_timeout_without_intervals_is_the_first_one_or_the_least() -> None:
    assert AdaptiveTimeout(2.0, first=300.0).seconds == 300.0
    assert AdaptiveTimeout(2.0).seconds == 2.0


def test_first_interval_counts_until_there_is_another() -> None:
    timeout = AdaptiveTimeout(2.0)
    timeout.record(10.0)
    assert timeout.seconds == 80.0
    timeout.record(1.0)
    assert timeout.seconds == 8.0


def test_long_interval_raises_the_timeout_for_a_while() -> None:
    timeout = AdaptiveTimeout(2.0)
    for seconds in (1.0, 10.0, 1.0):
        timeout.record(seconds)
    assert timeout.seconds == 8 * 9.0
    for _ in range(30):
        timeout.record(1.0)
    assert timeout.seconds == 8.0


@given(st.floats(0.0, 10.0), st.floats(0.0, 100.0), st.lists(st.floats(0.0, 1e3), min_size=1))
def test_timeout_is_between_its_bounds_and_above_the_last_interval(
    least: float, more: float, intervals: list[float]
) -> None:
    timeout = AdaptiveTimeout(least, least + more)
    for seconds in intervals:
        timeout.record(seconds)
    assert least <= timeout.seconds <= least + more
    assert timeout.seconds >= min(least + more, TIMEOUT_FACTOR * intervals[-1])
    assert timeout.seconds <= max(least, TIMEOUT_FACTOR * max(intervals))


# -- deadlines of regular events -----------------------------------------------------------


def steps(deadlines: Deadlines, peer: int, *seconds: float) -> float:
    """Let a peer make steps of such lengths; return the time at which the next one begins."""
    now = 0.0
    for each in seconds:
        deadlines.start(peer, now)
        now += each
        deadlines.arrived(peer, now)
    deadlines.start(peer, now)
    return now


def test_deadline_follows_the_intervals_of_its_peer() -> None:
    deadlines = Deadlines(2.0, first=300.0)
    quick, slow = steps(deadlines, 0, 1.0), steps(deadlines, 1, 10.0)
    steps(deadlines, 2)
    assert not deadlines.is_overdue(0, quick + 7.9)
    assert deadlines.is_overdue(0, quick + 8.1)
    assert not deadlines.is_overdue(1, slow + 79.0)
    assert deadlines.is_overdue(1, slow + 81.0)
    assert not deadlines.is_overdue(2, 299.0)
    assert deadlines.is_overdue(2, 301.0)
    assert not deadlines.is_overdue(3, 999.0), "nothing is expected of it"
    assert deadlines.overdue(11.0 + 80.0) == {0: 90.0, 1: 81.0}


def test_interval_with_a_limit_is_not_recorded() -> None:
    deadlines = Deadlines(2.0)
    now = steps(deadlines, 0, 1.0, 1.0)
    deadlines.start(0, now, 300.0)
    assert not deadlines.is_overdue(0, now + 299.0)
    assert deadlines.is_overdue(0, now + 301.0)
    deadlines.arrived(0, now + 200.0)
    deadlines.start(0, now + 200.0)
    assert deadlines.timeout_s(0) == 8.0


def test_wait_twice_as_long_as_usual_is_unusual() -> None:
    deadlines = Deadlines(2.0)
    now = steps(deadlines, 0, 0.001)
    assert deadlines.is_unusual(0, now + 0.01)
    assert not deadlines.is_unusual(0, now + 0.0015)
    assert not deadlines.is_overdue(0, now + 1.9)
    assert deadlines.is_overdue(0, now + 2.1)


def test_waiting_peer_is_never_overdue_and_forgotten_one_begins_anew() -> None:
    deadlines = Deadlines(2.0, first=300.0)
    now = steps(deadlines, 0, 1.0)
    deadlines.stop(0)
    assert 0 not in deadlines
    assert not deadlines.is_overdue(0, now + 1e6)
    deadlines.start(0, now)
    assert 0 in deadlines
    deadlines.forget(0)
    assert deadlines.timeout_s(0) == 300.0
    assert deadlines.overdue(now + 1e6) == {}


def test_time_of_suspension_does_not_count() -> None:
    deadlines = Deadlines(2.0)
    now = steps(deadlines, 0, 1.0)
    deadlines.postpone(60.0)
    assert not deadlines.is_overdue(0, now + 67.0)
    assert deadlines.is_overdue(0, now + 69.0)
    assert deadlines.since(0) == now + 60.0
