"""What a caller can do with a handle: ask, wait, be called back."""

from __future__ import annotations

import logging
import threading

import pytest
import torch

from wingbeat.collectives import Collectives, Handle
from wingbeat.errors import PeerError
from wingbeat.transport import loopback


def test_handle_is_done_and_calls_back_once_when_all_links_are_done() -> None:
    first, second = loopback.worlds(2, interfaces=3)
    called: list[Handle] = []
    ended = threading.Event()
    handle = Collectives(first).all_reduce(torch.ones(30))

    def back(which: Handle) -> None:
        assert which.done()
        called.append(which)
        ended.set()

    handle.add_done_callback(back)
    assert not handle.done()
    assert not called
    Collectives(second).all_reduce(torch.ones(30)).wait()
    handle.wait()
    assert handle.done()
    assert ended.wait(20)
    handle.add_done_callback(called.append)
    assert called == [handle, handle], "once each; the second at once"
    for world in (first, second):
        world.close()


def test_failed_collective_calls_back() -> None:
    board = loopback.Switchboard()
    first, _ = loopback.worlds(2, switchboard=board, timeout=20.0)
    handle = Collectives(first).all_reduce(torch.ones(8))
    ended = threading.Event()
    handle.add_done_callback(lambda _: ended.set())
    board.fail(1)
    assert ended.wait(20)
    assert handle.done()
    with pytest.raises(PeerError, match="rank 1 failed"):
        handle.wait()
    first.close()


def test_exception_of_a_callback_is_logged_and_others_run(caplog) -> None:
    (world,) = loopback.worlds(1)
    collectives = Collectives(world)
    handle = collectives.all_reduce(torch.ones(4))
    handle.wait()
    with caplog.at_level(logging.ERROR, logger="wingbeat"):
        handle.add_done_callback(lambda _: 1 / 0)  # type: ignore[arg-type, return-value]
    assert "a callback of a collective failed" in caplog.text
    collectives.all_reduce(torch.ones(4)).wait()
    world.close()


def test_handle_without_jobs_is_done() -> None:
    called: list[Handle] = []
    handle = Handle([])
    handle.add_done_callback(called.append)
    assert handle.done()
    assert called == [handle]
