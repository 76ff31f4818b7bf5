"""Graceful shutdown of a worker: at its end, after an exception, and after SIGTERM."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import zmq.utils.garbage  # noqa: F401  (see `at_the_end`)

from wingbeat.errors import UsageError
from wingbeat.observe.log import log
from wingbeat.transport.failures import PATIENCE, TERMINATED, has_left, say_failed, say_left
from wingbeat.transport.store import Ledger
from wingbeat.transport.text import number
from wingbeat.transport.world import World, current

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


GRACE_S = 25.0
"""Seconds after SIGTERM: below the 30 that torchrun, SLURM and Kubernetes wait before SIGKILL."""

_LOOK_S = 1.0
"""Seconds between two looks at whether another rank got the signal."""

_AGREE_S = 5.0
"""Seconds in which all ranks say how many steps they have made; each looks every `_LOOK_S`."""

_POLL_S = 0.02

_DIGITS = 15
"""Decimal digits of a number of steps that another rank may publish."""


def on_terminate(save: Callable[[], object], *, grace: float = GRACE_S) -> None:
    """Register what saves the job's state when its scheduler stops it by SIGTERM.

    When any rank gets SIGTERM, every rank finishes a step, calls ``save()``, and leaves with
    ``SystemExit(143)``, 128 plus the number of the signal. ``save`` runs in the training thread,
    before the next forward of a model in training: after ``optimizer.step()`` and what follows it
    in the loop. Where each step needs all workers, it runs after the same step on all ranks; under
    `Canary`, `Ripples`, `ADPSGD`, `LocalSGD` and `DiLoCo` after the present step of each rank. So
    it may call what all ranks have to call, such as ``optimizer.state_dict()`` of a divided
    optimizer or `consensus`.

    All ranks have to call this, in the main thread, after `init`; a second call replaces ``save``
    and ``grace``. A signal handler that the script has installed before is called too. Without
    this call SIGTERM does what it does anywhere: it ends the process at once.

    Args:
        save: takes no arguments.
        grace: seconds after SIGTERM within which the step and ``save`` have to end. Then the
            process ends with status 143, whatever it does, and says so on standard error. Give
            less than the scheduler waits before SIGKILL.

    Raises:
        UsageError: no `init` before, not in the main thread, or arguments that cannot be.
    """
    global _installed
    world = current()
    if not callable(save):
        raise UsageError(f"on_terminate(save={save!r}): pass a function without arguments")
    if not isinstance(grace, (int, float)) or not 0 < grace < float("inf"):
        raise UsageError(f"grace={grace!r}: allowed are seconds above 0")
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            "on_terminate() was called outside of the main thread, where Python installs no signal "
            "handlers: call it there"
        )
    if _installed is not None and _installed.world is world:
        _installed.save, _installed.grace = save, grace
        return
    _installed = Termination(world, save, grace)
    _installed.install()


class Termination:
    """What becomes of SIGTERM in one process.

    The first rank that gets the signal publishes that in the store, where all look once a second.
    Each then publishes how many steps it has made, and ends none more until all have: the job
    stops after one step more than the most that any had made. So no rank stops before a step for
    which others need it, and nothing is exchanged while there is no signal.

    Args:
        world: all workers.
        save: saves the state.
        grace: seconds after the signal until this process ends.

    Attributes:
        after: how many steps are made before the job stops; None while nobody got the signal.
    """

    def __init__(self, world: World, save: Callable[[], object], grace: float) -> None:
        self.world, self.save, self.grace = world, save, grace
        self.after: int | None = None
        store = world.store if world.group_store is None else world.group_store()
        assert isinstance(store, Ledger), "every store of a world is"
        self._store: Ledger = store
        self._pid = os.getpid()
        self._count, self._between = 0, False
        self._counting = threading.Lock()
        self._signalled, self._closed = threading.Event(), threading.Event()
        self._doing = "it was finishing a step; nothing was saved"
        self._former: Any = signal.SIG_DFL
        self._thread = threading.Thread(target=self._run, name="wingbeat-sigterm", daemon=True)

    def install(self) -> None:
        """Take the signal over from whoever has it, until the world is closed."""
        self._former = signal.signal(signal.SIGTERM, self._on_signal)
        self.world.on_close(self.close)
        self._thread.start()

    def close(self) -> None:
        """Give the signal back, unless this process is leaving by it."""
        if self.after is not None:
            return
        self._closed.set()
        self._signalled.set()  # ends the thread's wait
        ours = signal.getsignal(signal.SIGTERM) == self._on_signal
        if ours and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._former)

    def _on_signal(self, number: int, frame: Any) -> None:
        if os.getpid() != self._pid or self._closed.is_set():  # in a fork, or after `shutdown`
            signal.signal(number, self._former)
            os.kill(os.getpid(), number)
            return
        self._signalled.set()
        if callable(self._former):
            self._former(number, frame)

    # -- the training thread ------------------------------------------------------------------

    def stepped(self) -> None:
        """Count a step that has just ended."""
        with self._counting:
            self._count += 1
        self._between = True

    def between(self, *, lockstep: bool) -> None:
        """Between two steps: stop here if the job does.

        Args:
            lockstep: whether all ranks have to stop after the same step.

        Raises:
            SystemExit: the job stops, and all is saved; its code is 143.
        """
        if not self._between:
            return
        self._between = False
        after = self.after
        if after is not None and (self._count >= after or not lockstep):
            self._leave()

    def _leave(self) -> None:
        rank = self.world.rank
        log.info("rank %d: SIGTERM: saving after step %d", rank, self._count)
        self._doing = "save() was running"
        self.save()
        self._doing = "it was leaving; save() had returned"
        terminate()

    # -- a thread of its own ------------------------------------------------------------------

    def _run(self) -> None:
        while not self._signalled.wait(_LOOK_S):
            if self._store.has("terminate"):
                break
        if self._closed.is_set():
            return
        deadline = time.monotonic() + self.grace
        with self._counting:
            self.after = self._agreed()
        if self._closed.wait(max(0.0, deadline - time.monotonic())):
            return
        # As bytes, for the thread that hangs may have locked `sys.stderr`.
        os.write(
            2,
            f"wingbeat: rank {self.world.rank} ends {self.grace:g} s after SIGTERM, while "
            f"{self._doing}\n".encode(),
        )
        os._exit(TERMINATED)

    def _agreed(self) -> int:
        """Return after how many steps all stop; called while this rank ends none."""
        store, rank = self._store, self.world.rank
        most, deadline = self._count, time.monotonic() + _AGREE_S
        with contextlib.suppress(RuntimeError, TimeoutError):  # who serves the store is gone
            store.set("terminate", str(rank))
            store.set(f"terminate/steps/{rank}", str(self._count))
            for other in range(self.world.size):
                key = f"terminate/steps/{other}"
                while not store.has(key) and time.monotonic() < deadline:
                    if has_left(store, other):
                        break
                    time.sleep(_POLL_S)
                if store.has(key):
                    most = max(most, self._read(store.get(key, _LOOK_S), f"rank {other}"))
            return self._read(store.claim("terminate/after", str(most + 1)), "the store")
        return most + 1

    def _read(self, said: str, who: str) -> int:
        """Return a number of steps; this rank's own, or the next, where it is none."""
        if (steps := number(said, _DIGITS)) is not None:
            return steps
        log.warning(
            "rank %d: %s says %r for a number of steps after SIGTERM: it is ignored",
            self.world.rank, who, said[:80],
        )  # fmt: skip
        return self._count + (who == "the store")


_installed: Termination | None = None


def stepped() -> None:
    """Count a step that has just ended, if `on_terminate` was called."""
    if _installed is not None:
        _installed.stepped()


def between(*, lockstep: bool) -> None:
    """Between two steps: stop here if the job does, and `on_terminate` was called."""
    if _installed is not None:
        _installed.between(lockstep=lockstep)
