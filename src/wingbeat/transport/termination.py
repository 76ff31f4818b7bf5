"""SIGTERM: all ranks stop after the same step, save, and leave with exit status 143."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from wingbeat.errors import UsageError
from wingbeat.observe.log import log
from wingbeat.transport import leaving
from wingbeat.transport.blame import TERMINATED, has_left
from wingbeat.transport.store import Ledger
from wingbeat.transport.text import number
from wingbeat.transport.world import World, current

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
        leaving.terminate()

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
