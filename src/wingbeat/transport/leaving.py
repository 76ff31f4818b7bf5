"""The end of a worker: it says how it leaves, closes what is open, and rank 0 goes last."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.util
import os
import sys
import time
from collections.abc import Callable
from typing import NoReturn

import zmq.utils.garbage  # noqa: F401 (see `at_the_end`)

from wingbeat.transport.blame import PATIENCE, TERMINATED, has_left, say_failed, say_left
from wingbeat.transport.world import World

LAST = 10.0
"""Seconds for which rank 0, when it is done, serves the store to those who still train."""

_POLL = 0.02


def close(world: World) -> None:
    """Close a world, and tell the others before whether this rank has finished or failed."""
    error = failure()
    if error is not None:
        say_failed(world.store, world.rank, error)  # first: a peer that misses this rank asks why
    # The last callback: by then everything that was queued is sent, and nothing is closed yet.
    # Who is terminated has not finished: others that wait for it had no more batches than it.
    world.on_close(lambda: say_left(world.store, world.rank, not failing() and not _End.terminated))
    world.close()


def at_the_end(world: World, shutdown: Callable[[], None]) -> None:
    """Have ``shutdown`` called when this process ends; it does nothing if it has been called.

    Threads that still use gloo's sockets while the interpreter ends would crash it. It is called
    before pyzmq ends the thread that frees what was sent without a copy, as functions of atexit are
    called in reverse order: pyzmq's module is imported first.
    """
    _End.of = _End(world, shutdown)
    atexit.unregister(_end)
    atexit.register(_end)
    if multiprocessing.parent_process() is not None:
        # A child of multiprocessing, if forked, ends without the functions of atexit. And these
        # finalizers are called where the exception that ends it can still be seen.
        multiprocessing.util.Finalize(None, _end, exitpriority=1)


class _End:
    """What is to be done when this process ends; only the last `init` counts."""

    of: _End | None = None
    begun = False
    terminated = False

    def __init__(self, world: World, shutdown: Callable[[], None]) -> None:
        self.pid = os.getpid()
        self.store, self.size, self.shutdown = world.store, world.size, shutdown
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self.serves = world.rank == 0 and not agent


def _end() -> None:
    this, _End.of = _End.of, None
    if this is None or this.pid != os.getpid():  # a fork's threads are its parent's
        return
    _End.begun = True
    failed = failing()
    this.shutdown()
    if not this.serves:
        return
    # Who learns that a connection is closed asks the store why, which ends with this process.
    deadline = time.monotonic() + (PATIENCE if failed else LAST)
    with contextlib.suppress(KeyboardInterrupt):
        for rank in range(1, this.size):
            while not has_left(this.store, rank) and time.monotonic() < deadline:
                time.sleep(_POLL)


def terminate() -> NoReturn:
    """End this process as SIGTERM asks, in good order, once all that is to be saved is saved."""
    _End.terminated = True
    raise SystemExit(TERMINATED)


def failing() -> bool:
    """Whether an exception is about to end this process, or the block that shuts down."""
    return failure() is not None


def failure() -> BaseException | None:
    """Return the exception that is about to end this process, or the block that shuts down."""
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        if error.code in (None, 0, TERMINATED):
            return None
        return error.__context__ or error  # as in `except ...: sys.exit(1)`
    if error is None and _End.begun:
        # The interpreter leaves it there for functions of atexit, called after `except`.
        return getattr(sys, "last_value", None)
    return error
