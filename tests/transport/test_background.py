"""A thread in the background that ends by an exception."""

from __future__ import annotations

import threading

import pytest

from wingbeat.transport.services import BackgroundThread

PATIENCE = 20.0


def test_a_thread_that_raises_has_its_name_and_the_exception_as_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    died = threading.Event()

    def work() -> None:
        raise KeyError("nothing there")

    thread = BackgroundThread(work, "wingbeat-test", died.set)
    thread.start()
    assert died.wait(PATIENCE)
    assert thread.failure.startswith("thread wingbeat-test has ended by KeyError: 'nothing there'")
    assert "\n" not in thread.failure
    thread.join(PATIENCE)
    assert "Traceback" in caplog.text


def test_a_thread_that_returns_has_no_failure() -> None:
    died = threading.Event()
    thread = BackgroundThread(lambda: None, "wingbeat-test", died.set)
    thread.start()
    thread.join(PATIENCE)
    assert thread.failure == ""
    assert not died.is_set()
