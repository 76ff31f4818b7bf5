"""Graceful shutdown of a worker: at the end of its script, after an exception, and after SIGTERM.

A worker publishes how it exits, closes its connections, and rank 0 exits last because it serves the
store. After SIGTERM all ranks stop after the same step, save, and exit with status 143.
"""

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
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from wingbeat.errors import UsageError
from wingbeat.observe.log import log, log_event
from wingbeat.transport.failures import (
    ANSWER_TIMEOUT_S,
    TERMINATED,
    await_value,
    first_failed,
    has_finished,
    process_has_ended,
    publish_exit,
    publish_failure,
    published_failure,
    published_incarnation,
)
from wingbeat.transport.store import Store
from wingbeat.transport.text import parse_number
from wingbeat.transport.world import World, current

STORE_LINGER_S = 10.0
"""Seconds for which rank 0 serves the store to workers that still train after rank 0 is done."""


def close_world(world: World) -> None:
    """Publish whether this rank has finished or failed, then close the world."""
    error = pending_exception()
    if error is not None:
        # A peer that loses this rank reads the failure, so publish it before closing anything.
        publish_failure(world.store, world.rank, error)
    # The last callback runs when all queued messages are sent and nothing is closed yet. A rank
    # stopped by SIGTERM has not finished: it had no fewer batches than its peers.
    world.on_close(
        lambda: publish_exit(
            world.store, world.rank, not is_failing() and not _ExitHandler.terminated
        )
    )
    world.close()


def close_at_exit(world: World, shutdown: Callable[[], None]) -> None:
    """Call ``shutdown`` when this process exits.

    The interpreter would crash if threads of torch's default group (gloo) ran while it exits.
    """
    _ExitHandler.of = _ExitHandler(world, shutdown)
    atexit.unregister(_run_at_exit)
    atexit.register(_run_at_exit)
    if multiprocessing.parent_process() is not None:
        # A forked child of multiprocessing does not run atexit functions. Its finalizers still see
        # the exception that ends the process.
        multiprocessing.util.Finalize(None, _run_at_exit, exitpriority=1)


class _ExitHandler:
    """What this process does when it exits. A later `init` replaces it."""

    of: _ExitHandler | None = None
    begun = False
    terminated = False

    def __init__(self, world: World, shutdown: Callable[[], None]) -> None:
        self.pid = os.getpid()
        self.store, self.size, self.shutdown = world.store, world.size, shutdown
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self.serves = world.rank == 0 and not agent and world.torch_job is None


def _run_at_exit() -> None:
    this, _ExitHandler.of = _ExitHandler.of, None
    if this is None or this.pid != os.getpid():  # threads do not survive a fork
        return
    _ExitHandler.begun = True
    failed = is_failing()
    this.shutdown()
    if not this.serves:
        return
    # A peer that finds a closed connection reads the reason in the store, which this process
    # serves.
    deadline = time.monotonic() + (ANSWER_TIMEOUT_S if failed else STORE_LINGER_S)
    with contextlib.suppress(KeyboardInterrupt):
        for rank in range(1, this.size):
            await_value(this.store, f"left/{rank}", rank, deadline - time.monotonic())


def exit_after_sigterm() -> NoReturn:
    """Exit with status 143. Called after all state is saved."""
    _ExitHandler.terminated = True
    # A launcher and its scheduler may both send the signal. The interpreter restores the default
    # action of a signal with a handler before the process ends, which would be its status then.
    with contextlib.suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(TERMINATED)


def is_failing() -> bool:
    """Whether an exception is about to end this process."""
    return pending_exception() is not None


def pending_exception() -> BaseException | None:
    """Return the exception that is about to end this process, or None."""
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        if error.code in (None, 0, TERMINATED):
            return None
        return error.__context__ or error  # as in `except ...: sys.exit(1)`
    if error is None and _ExitHandler.begun:
        # The interpreter sets it for atexit functions, which run after `except`.
        return getattr(sys, "last_value", None)
    return error


GRACE_S = 25.0
"""Default seconds from SIGTERM to exit: torchrun, SLURM and Kubernetes send SIGKILL after 30."""

_CHECK_INTERVAL_S = 1.0
"""Seconds between two checks for a signal on another rank."""

_AGREEMENT_S = 5.0
"""Seconds in which all ranks publish their step counts."""


_MAX_DIGITS = 15
"""Maximum decimal digits of a step count from another rank."""


def on_terminate(save: Callable[[], object], *, grace: float = GRACE_S) -> None:
    """Register a function that saves the job's state when its scheduler sends SIGTERM.

    When any rank receives SIGTERM, every rank finishes a step, calls ``save()``, and exits with
    ``SystemExit(143)``, 128 plus the signal's number. ``save`` runs in the training thread, before
    the next forward of a model in training mode: after ``optimizer.step()`` and the code that
    follows it in the loop. If each step needs all workers, ``save`` runs after the same step on all
    ranks. With `Canary`, `Ripples`, `ADPSGD`, `LocalSGD` and `DiLoCo` it runs after the current
    step of each rank. ``save`` may therefore call functions that all ranks must call, such as
    ``optimizer.state_dict()`` of a sharded optimizer or `consensus`.

    All ranks must call this in the main thread after `init`. A second call replaces ``save`` and
    ``grace``. A signal handler that was installed before is called too. Without this call, SIGTERM
    ends the process at once.

    Args:
        save: a function without arguments.
        grace: seconds after SIGTERM within which the step and ``save`` must end. After that the
            process writes a line to standard error and exits with status 143. Set less than the
            scheduler's delay before SIGKILL.

    Raises:
        UsageError: called before `init`, outside of the main thread, with invalid arguments, or in
            a job whose replicas are torch jobs of their own.
    """
    global _installed
    world = current()
    if not callable(save):
        raise UsageError(f"on_terminate(save={save!r}): pass a function without arguments")
    if not isinstance(grace, (int, float)) or not 0 < grace < float("inf"):
        raise UsageError(f"grace={grace!r}: allowed are seconds above 0")
    if world.torch_job is not None:
        raise UsageError(
            "on_terminate() was called in a job of several torch jobs (WINGBEAT_REPLICA): torchrun "
            "sends SIGTERM to a replica that lost a process, and the others must continue; save "
            "checkpoints during training"
        )
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            "on_terminate() was called outside of the main thread, but Python installs signal "
            "handlers only there: call it in the main thread"
        )
    if _installed is not None and _installed.world is world:
        _installed.save, _installed.grace = save, grace
        return
    _installed = SigtermHandler(world, save, grace)
    _installed.install()


class SigtermHandler:
    """Handles SIGTERM in one process.

    The first rank that receives the signal publishes it in the store, which all ranks check once a
    second. Each rank then publishes its step count and completes no step until all ranks have. The
    job stops one step after the highest count, so no rank stops before a step for which others need
    it. Without a signal the ranks exchange nothing.

    ``after`` is the step count after which the job stops; None while no rank received the signal.
    ``counts`` has the number of steps of each rank at that time.
    """

    def __init__(self, world: World, save: Callable[[], object], grace: float) -> None:
        self.world, self.save, self.grace = world, save, grace
        self.after: int | None = None
        self.counts: dict[int, int] = {}
        self._store = world.store
        self._pid = os.getpid()
        self._count, self._is_between = 0, False
        self._counting = threading.Lock()
        self._signalled, self._closed = threading.Event(), threading.Event()
        self._doing = "it was completing a step; nothing was saved"
        self._former: Any = signal.SIG_DFL
        self._thread = threading.Thread(target=self._run, name="wingbeat-sigterm", daemon=True)

    def install(self) -> None:
        """Install the signal handler until the world is closed."""
        self._former = signal.signal(signal.SIGTERM, self._on_signal)
        self.world.on_close(self.close)
        self._thread.start()

    def close(self) -> None:
        """Restore the former handler, unless this process is exiting because of the signal."""
        if self.after is not None:
            return
        self._closed.set()
        self._signalled.set()  # wakes the thread
        ours = signal.getsignal(signal.SIGTERM) == self._on_signal
        if ours and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._former)

    def _on_signal(self, signum: int, frame: Any) -> None:
        if os.getpid() != self._pid or self._closed.is_set():  # in a fork, or after `shutdown`
            signal.signal(signum, self._former)
            os.kill(os.getpid(), signum)
            return
        self._signalled.set()
        if callable(self._former):
            self._former(signum, frame)

    def count_step(self) -> None:
        """Count a completed step."""
        with self._counting:
            self._count += 1
        self._is_between = True

    def stop_if_due(self, *, lockstep: bool, together: Sequence[int] = ()) -> None:
        """Exit here with code 143 if the job stops.

        All ranks stop after the same step if they run in ``lockstep``; otherwise those that train
        a model ``together`` do, and any other one here.
        """
        if not self._is_between:
            return
        self._is_between = False
        after = self.after
        if after is not None and not lockstep:
            after = max((self.counts.get(rank, 0) + 1 for rank in together), default=0)
        if after is not None and self._count >= after:
            self._leave()

    def _leave(self) -> None:
        rank = self.world.rank
        log_event("terminated", f"rank {rank}: SIGTERM: saving after step {self._count}", rank=rank)
        self._doing = "save() was running"
        self.save()
        self._doing = "it was leaving; save() had returned"
        exit_after_sigterm()

    def _run(self) -> None:
        while not self._signalled.wait(_CHECK_INTERVAL_S):
            if self._store.has("terminate"):
                break
        if self._closed.is_set():
            return
        deadline = time.monotonic() + self.grace
        with self._counting:
            self.after = self._agree()
        if self._closed.wait(max(0.0, deadline - time.monotonic())):
            return
        # Written as bytes: a blocked thread may hold the lock of `sys.stderr`.
        os.write(
            2,
            f"wingbeat: rank {self.world.rank} ends {self.grace:g} s after SIGTERM, while "
            f"{self._doing}\n".encode(),
        )
        os._exit(TERMINATED)

    def _agree(self) -> int:
        """Return the step count after which all ranks stop; no step completes meanwhile."""
        store, rank = self._store, self.world.rank
        most, deadline = self._count, time.monotonic() + _AGREEMENT_S
        with contextlib.suppress(RuntimeError, TimeoutError):  # rank 0 has exited
            store.set("terminate", str(rank))
            store.set(f"terminate/steps/{rank}", str(self._count))
            self.counts[rank] = self._count
            for other in range(self.world.size):
                left = deadline - time.monotonic()
                text = await_value(store, f"terminate/steps/{other}", other, left)
                if text is not None:
                    self.counts[other] = self._read(text, f"rank {other}")
                    most = max(most, self.counts[other])
            return self._read(store.claim("terminate/after", str(most + 1)), "the store")
        return most + 1

    def _read(self, text: str, who: str) -> int:
        """Parse a step count; fall back to this rank's own count, or the next one."""
        if (steps := parse_number(text, _MAX_DIGITS)) is not None:
            return steps
        log.warning(
            "rank %d: %s published an invalid step count after SIGTERM: %r; it is ignored",
            self.world.rank, who, text[:80],
        )  # fmt: skip
        return self._count + (who == "the store")


_installed: SigtermHandler | None = None


def count_step() -> None:
    """Count a completed step if `on_terminate` was called."""
    if _installed is not None:
        _installed.count_step()


def stop_if_due(*, lockstep: bool, together: Sequence[int] = ()) -> None:
    """Exit between two steps if the job stops and `on_terminate` was called."""
    if _installed is not None:
        _installed.stop_if_due(lockstep=lockstep, together=together)


_SILENT = "gave no sign in time"
_ENDED = "has ended without an exception: it was killed, or called os._exit()"


_STORE_S = 1.0
"""Seconds to wait for the store when this worker exits."""


class Departures:
    """One worker's record of lost workers, and of the exceptions that ended them.

    A thread reads the store, which may be lost with the worker, or respond late. Without a store,
    nothing is read. ``ranks`` has the rank of each worker in the job, and ``everyone`` the ranks
    that may have failed first; default: the same. ``gone`` maps each lost worker to how it exited,
    unless it finished.
    """

    def __init__(
        self,
        store: Store | None,
        me: str,
        ranks: Sequence[int] = (),
        *,
        everyone: Sequence[int] = (),
        record: Callable[..., None] = log_event,
    ) -> None:
        self._store, self._me, self._record = store, me, record
        self._ranks, self._everyone = ranks, everyone or ranks
        self.gone: dict[int, str] = {}
        self._asking: list[threading.Thread] = []

    def lost(self, worker: int, how: str = "") -> None:
        """Log that a worker is lost, with the exception that ended it; does not block.

        ``how`` is the reason, as a predicate; empty if it is unknown, and the worker may have
        finished.
        """
        if worker in self.gone:
            return
        self.gone[worker] = how or _SILENT
        self._ask(self._log_lost, worker, how)

    def back(self, worker: int) -> None:
        """Log that a lost worker has rejoined; does not block."""
        if self.gone.pop(worker, None) is not None:
            self._ask(self._log_back, worker)

    def how(self, worker: int) -> str:
        """Return how a lost worker exited. Blocks on the store."""
        store = self._store
        failure = "" if store is None else published_failure(store, self._rank(worker))
        return f"failed with {failure}" if failure else self.gone.get(worker, _SILENT)

    def first_failure(self) -> str | None:
        """Return the worker that failed first, with its exception, or None. Blocks on the store."""
        if self._store is None or (found := first_failed(self._store, self._everyone)) is None:
            return None
        return f"rank {found[0]} failed with {found[1]}"

    def close(self) -> None:
        """Log the workers that are still lost in one line, unless this worker has failed."""
        if is_failing():
            return
        for thread in self._asking:
            thread.join(_STORE_S)
        if self.gone:
            gone = sorted(self.gone.items())
            how = ", ".join(f"rank {self._rank(worker)} {reason}" for worker, reason in gone)
            log.warning("%s: trained to the end without all workers: %s", self._me, how)

    def _ask(self, work: Callable[..., None], *args: object) -> None:
        """Call ``work`` in a thread that may wait for the store."""
        if self._store is None:
            work(*args)
            return
        thread = threading.Thread(target=work, args=args, name="wingbeat-departures", daemon=True)
        with contextlib.suppress(RuntimeError):  # the interpreter is exiting
            thread.start()
        self._asking = [each for each in (*self._asking, thread) if each.is_alive()]

    def _log_lost(self, worker: int, how: str) -> None:
        """Read how a worker exited, and log it."""
        rank, store = self._rank(worker), self._store
        if store is not None:
            failure = published_failure(store, rank, 0.0 if how else ANSWER_TIMEOUT_S)
            if not failure and not how and has_finished(store, rank):
                self.gone.pop(worker, None)
                self._log("left", worker, f"rank {rank} has finished; the others continue")
                return
            if failure:
                how = f"failed with {failure}"
            elif not how and process_has_ended(store, rank):
                how = _ENDED
            if how and worker in self.gone:
                self.gone[worker] = how
        reason = self.gone.get(worker)
        if reason is not None:  # otherwise it has rejoined
            self._log("lost", worker, f"rank {rank} {reason}; the others continue without it")

    def _log_back(self, worker: int) -> None:
        self._log("returned", worker, f"rank {self._rank(worker)} is back")

    def _log(self, event: str, worker: int, text: str) -> None:
        rank = self._rank(worker)
        incarnation = 0 if self._store is None else published_incarnation(self._store, rank)
        self._record(event, f"{self._me}: {text}", rank=rank, incarnation=incarnation)

    def _rank(self, worker: int) -> int:
        return self._ranks[worker] if self._ranks else worker


_made: weakref.WeakKeyDictionary[World, Departures] = weakref.WeakKeyDictionary()


def departures_of(world: World) -> Departures:
    """Return the record of this worker in its job, shared by all models that it trains."""
    while world.parent is not None:
        world = world.parent
    if world not in _made:
        replicas = () if world.inside is None else world.inside.replicas
        everyone = sorted(rank for replica in replicas for rank in replica)
        _made[world] = Departures(world.store, world.me, world.ranks, everyone=everyone)
        world.on_close(_made[world].close)
    return _made[world]
