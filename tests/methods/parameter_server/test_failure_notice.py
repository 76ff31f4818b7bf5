"""`FailureNotice`: a reason reaches the other workers, and a slow store blocks nobody."""

from __future__ import annotations

import threading
import time

import pytest

from helpers.waiting import PATIENCE, until
from wingbeat.methods.parameter_server.launch import FailureNotice
from wingbeat.methods.parameter_server.protocol import MAX_REASON, printable
from wingbeat.transport.loopback import Switchboard


def test_published_reason_reaches_other_workers() -> None:
    store = Switchboard()
    one, other = FailureNotice(store, "a"), FailureNotice(store, "a")
    assert other.poll() is None
    one.publish("server 1 has ended")
    one.close(PATIENCE)
    until(lambda: other.poll() == "server 1 has ended")
    other.close(PATIENCE)


def test_first_reason_is_kept_per_key() -> None:
    store = Switchboard()
    for text in ("first", "second"):
        news = FailureNotice(store, "a")
        news.publish(text)
        news.close(PATIENCE)
    assert store.get("a", 0.0) == "first"
    elsewhere = FailureNotice(store, "b")
    elsewhere.poll()
    elsewhere.close(PATIENCE)
    assert elsewhere.poll() is None


def test_reason_is_printable_and_limited() -> None:
    assert printable(b"a\nb\x1b\xff") == "a?b?\ufffd"
    assert len(printable(b"x" * 2 * MAX_REASON)) == MAX_REASON
    store = Switchboard()
    store.set("a", "one\ntwo" + "x" * MAX_REASON)
    news = FailureNotice(store, "a")
    until(news.poll)
    assert str(news.poll()).startswith("one?two")
    assert len(str(news.poll())) == MAX_REASON
    news.close(PATIENCE)


def test_slow_store_does_not_block() -> None:
    """It may be gone with the very host that the news is about."""
    store, answers = Switchboard(), threading.Event()
    store.has = lambda key: answers.wait(PATIENCE) and False  # type: ignore[method-assign]
    news = FailureNotice(store, "a")
    begin = time.monotonic()
    assert news.poll() is None
    news.publish("server 1 has ended")
    assert news.poll() is None
    news.close(0.05)
    assert time.monotonic() - begin < PATIENCE / 4
    assert news._thread.is_alive()
    answers.set()
    news._thread.join(PATIENCE)
    assert not news._thread.is_alive()


def test_last_reason_is_published_before_close() -> None:
    store, asked, answers = Switchboard(), threading.Event(), threading.Event()
    has = store.has

    def late(key: str) -> bool:
        asked.set()
        answers.wait(PATIENCE)
        return has(key)

    store.has = late  # type: ignore[method-assign]
    news = FailureNotice(store, "a")
    news.poll()
    assert asked.wait(PATIENCE)
    news.publish("server 1 has ended")
    news.close(0.0)
    answers.set()
    news._thread.join(PATIENCE)
    assert store.get("a", 0.0) == "server 1 has ended"


@pytest.mark.parametrize("error", [RuntimeError, OSError, TimeoutError])
def test_store_error_does_not_end_thread(error: type[Exception]) -> None:
    store = Switchboard()

    def gone(key: str) -> bool:
        raise error("gone")

    has, store.has = store.has, gone  # type: ignore[method-assign]
    news = FailureNotice(store, "a")
    news.poll()
    until(lambda: not news._requested.is_set())
    store.has = has  # type: ignore[method-assign]
    store.set("a", "server 1 has ended")
    until(news.poll)
    news.close(PATIENCE)


def test_exception_in_thread_is_reported() -> None:
    store = Switchboard()

    def broken(key: str) -> bool:
        raise KeyError(key)

    store.has = broken  # type: ignore[method-assign]
    news = FailureNotice(store, "a")
    assert news.failure == ""
    news.poll()
    until(lambda: news.failure)
    assert news.failure.startswith("thread wingbeat-failures has ended by KeyError: 'a'")


def test_close_without_use_starts_no_thread() -> None:
    news = FailureNotice(Switchboard(), "a")
    news.close(PATIENCE)
    news.publish("late")
    assert news.poll() is None
    assert news._thread.ident is None
