from __future__ import annotations

import logging
import threading

import pytest

from wingbeat.errors import PeerError
from wingbeat.transport import graceful_shutdown as module
from wingbeat.transport import loopback
from wingbeat.transport.failures import publish_exit, publish_failure, publish_incarnation
from wingbeat.transport.graceful_shutdown import Departures, departures_of
from wingbeat.transport.loopback import Switchboard


class Record(Departures):
    """Departures of rank 0 of three; the lines that are logged."""

    def __init__(self, store: Switchboard | None) -> None:
        self.lines: list[str] = []
        self.events: list[tuple[str, int, int]] = []
        super().__init__(store, "rank 0", range(3), record=self.note)

    def note(self, event: str, text: str, *, rank: int, incarnation: int) -> None:
        self.lines.append(text)
        self.events.append((event, rank, incarnation))

    def settled(self) -> list[str]:
        for thread in self._asking:
            thread.join(20.0)
        return self.lines


def test_a_worker_that_an_exception_ended_is_named_with_it_at_once_and_at_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Switchboard()
    publish_failure(store, 1, ValueError("boom\nsecond line"))
    record = Record(store)
    record.lost(1, "has left")
    record.lost(1, "has left")  # another model of the same job
    assert record.settled() == [
        "rank 0: rank 1 failed with ValueError: boom; the others continue without it"
    ]
    assert record.events == [("lost", 1, 0)]
    record.close()
    assert caplog.messages == [
        "rank 0: trained to the end without all workers: rank 1 failed with ValueError: boom"
    ]


def test_a_worker_that_ended_without_a_word_is_named_by_what_was_seen(
    caplog: pytest.LogCaptureFixture,
) -> None:
    record = Record(Switchboard())
    record.lost(1, "has ended without a word")
    record.settled()
    record.close()
    assert [line.partition("rank 1 ")[2] for line in (*record.lines, *caplog.messages)] == [
        "has ended without a word; the others continue without it",
        "has ended without a word",
    ]


def test_a_worker_whose_host_refuses_connections_was_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "ANSWER_TIMEOUT_S", 0.0)
    monkeypatch.setattr(module, "process_has_ended", lambda _, rank: rank == 2)
    record = Record(Switchboard())
    record.lost(2)
    assert record.settled() == [
        "rank 0: rank 2 has ended without an exception: it was killed, or called os._exit(); "
        "the others continue without it"
    ]


def test_events_have_the_incarnation_that_was_lost_and_the_one_that_returned() -> None:
    store = Switchboard()
    record = Record(store)
    assert publish_incarnation(store, 1, 3) == 3
    record.lost(1, "has left")
    record.settled()
    assert publish_incarnation(store, 1, 3) == 4
    record.back(1)
    record.settled()
    assert record.events == [("lost", 1, 3), ("returned", 1, 4)]


def test_a_worker_of_which_nothing_was_seen_is_given_time_to_say_how_it_ended(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, waiting = Switchboard(), threading.Event()

    def sleep(_: float) -> None:
        publish_exit(store, 1, finished=True)
        waiting.set()

    monkeypatch.setattr(module.time, "sleep", sleep)
    record = Record(store)
    with caplog.at_level(logging.INFO, "wingbeat"):
        record.lost(1)
        assert record.settled() == ["rank 0: rank 1 has finished; the others continue"]
    assert waiting.is_set()
    assert record.events == [("left", 1, 0)]
    record.close()
    assert caplog.messages == []


def test_a_worker_that_never_says_how_it_ended_is_called_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "ANSWER_TIMEOUT_S", 0.0)
    record = Record(Switchboard())
    record.lost(2)
    assert record.settled() == [
        "rank 0: rank 2 gave no sign in time; the others continue without it"
    ]


def test_a_worker_that_came_back_is_not_in_the_last_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    record = Record(None)
    record.lost(1, "has left")
    record.back(1)
    record.back(2)  # was never gone
    record.close()
    assert record.lines == [
        "rank 0: rank 1 has left; the others continue without it",
        "rank 0: rank 1 is back",
    ]
    assert caplog.messages == []


def test_a_worker_that_fails_itself_has_not_trained_to_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    record = Record(None)
    record.lost(1, "has left")
    try:
        raise KeyError("mine")
    except KeyError:
        record.close()
    assert caplog.messages == []


def test_the_store_is_not_waited_for() -> None:
    release = threading.Event()

    class Hanging(Switchboard):
        def has(self, key: str) -> bool:
            release.wait(20.0)
            return False

    record = Record(Hanging())
    record.lost(1, "has left")
    assert record.lines == []
    release.set()
    assert len(record.settled()) == 1


def test_first_failure_names_who_failed_by_itself_and_not_who_waited_for_it() -> None:
    store = Switchboard()
    record = Record(store)
    assert record.first_failure() is None
    publish_failure(store, 0, PeerError("rank 0: rank 2 is gone"))
    assert record.first_failure() is None
    publish_failure(store, 2, OSError("disk"))
    assert record.first_failure() == "rank 2 failed with OSError: disk"
    assert record.how(2) == "failed with OSError: disk"
    assert Record(None).first_failure() is None


def test_workers_that_come_and_go_leave_no_threads_behind() -> None:
    record = Record(Switchboard())
    for _ in range(20):
        record.lost(1, "has left")
        record.settled()
        record.back(1)
        record.settled()
    assert len(record.lines) == 40
    assert len(record._asking) <= 1


def test_workers_of_a_column_are_named_by_their_ranks_in_the_job() -> None:
    store, lines = Switchboard(), list[str]()

    def note(event: str, text: str, *, rank: int, incarnation: int) -> None:
        assert (rank, incarnation) == (3, 0), event
        lines.append(text)

    record = Departures(store, "rank 1", (1, 3), everyone=range(4), record=note)
    publish_failure(store, 3, ValueError("boom"))
    publish_failure(store, 1, PeerError("rank 1: rank 3 failed"))
    record.lost(1)
    for thread in record._asking:
        thread.join(20.0)
    assert lines == ["rank 1: rank 3 failed with ValueError: boom; the others continue without it"]
    assert record.how(1) == "failed with ValueError: boom"
    publish_failure(store, 2, OSError("disk"))  # of another column, which is the cause
    assert record.first_failure() == "rank 2 failed with OSError: disk"
    record.back(1)
    for thread in record._asking:
        thread.join(20.0)
    assert lines[1:] == ["rank 1: rank 3 is back"]


def test_all_models_of_a_job_share_one_record_which_closes_with_the_world(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world, other = loopback.worlds(2)
    record = departures_of(world)
    assert departures_of(world) is record
    assert departures_of(other) is not record
    record.lost(1, "has left")
    world.close()
    assert "rank 0: trained to the end without all workers: rank 1 has left" in caplog.messages
