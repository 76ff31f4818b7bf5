"""Services that a worker starts: in processes, or in threads where workers are threads too."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import IO, ClassVar, Protocol

from wingbeat.errors import RendezvousError
from wingbeat.transport import descriptors
from wingbeat.transport.services.pipes import answer
from wingbeat.transport.store import Store

_PIPES = 6
"""File descriptors that are open while a process is started: both ends of three pipes."""


class Serves(Protocol):
    """What a service has to be told when it is started.

    Attributes:
        module: whose ``python -m`` is it, with `to_json` as its argument.
        asks_later: whether it uses the store after it has met all workers.
    """

    module: ClassVar[str]
    asks_later: ClassVar[bool]

    @property
    def me(self) -> str:
        """Say which service it is."""
        ...

    @property
    def timeout(self) -> float:
        """How many seconds any wait may take; that for workers to leave after SIGTERM too."""
        ...

    def to_json(self) -> str:
        """Return all of it as text."""
        ...

    def meet(self, store: Store) -> Callable[[Callable[[], bool]], None]:
        """Connect to all workers; return what serves them while its argument says to."""
        ...


class Started(Protocol):
    """A service that this worker has started."""

    def ended(self) -> str | None:
        """Say how it has ended, if it has."""

    def close(self, seconds: float) -> None:
        """Wait until it has ended, when all workers have left; after ``seconds`` end it."""

    def kill(self) -> None:
        """End it, without a wait for what it does."""


class InProcess:
    """A service in a process of its own.

    Args:
        config: what it is told.
        store: where it meets the workers; asked by a thread of its own.

    Raises:
        UsageError: too few file descriptors.
    """

    def __init__(self, config: Serves, store: Store) -> None:
        self._config, self._store = config, store
        descriptors.require(_PIPES, f"starting {config.me}")
        self._process = subprocess.Popen(
            [sys.executable, "-m", config.module, config.to_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_as_here(),
        )
        self._helper = threading.Thread(target=self._help, name="wingbeat-service", daemon=True)
        self._helper.start()

    def ended(self) -> str | None:
        """Say how it has ended, if it has."""
        code = self._process.poll()
        if code is None:
            return None
        how = f"by signal {-code}" if code < 0 else f"with exit status {code}"
        return f"{self._config.me} has ended {how}"

    def close(self, seconds: float) -> None:
        """Wait until it has ended, when all workers have left; after ``seconds`` end it."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._helper.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()

    def kill(self) -> None:
        """End it, without a wait for what it does."""
        self._process.kill()
        self.close(1.0)

    def _help(self) -> None:
        """Let it use the store for as long as it asks."""
        asks, hears = self._process.stdout, self._process.stdin
        assert asks is not None
        assert hears is not None
        try:
            with contextlib.suppress(OSError, ValueError, TimeoutError, RuntimeError):
                self._answer(asks, hears)
        finally:  # a service that waits for an answer has to hear that none comes
            with contextlib.suppress(OSError):
                hears.close()

    def _answer(self, asks: IO[str], hears: IO[str]) -> None:
        for line in asks:
            text, last = answer(line, self._store)
            hears.write(text + "\n")
            hears.flush()
            if last:
                return


def _as_here() -> dict[str, str]:
    """Return an environment in which modules are found where they are here.

    By itself ``python -m`` looks into the working directory first (and before Python 3.11 does so
    all the same), and not beside the script.
    """
    places = os.pathsep.join(place or os.getcwd() for place in sys.path)
    return {**os.environ, "PYTHONPATH": places, "PYTHONSAFEPATH": "1"}


class InThread:
    """A service in a thread, for workers that are threads themselves. For tests."""

    def __init__(self, config: Serves, store: Store) -> None:
        self._config, self._store = config, store
        self._why: str | None = None
        self._leaving = False
        self._thread = threading.Thread(target=self._run, name="wingbeat-service", daemon=True)
        self._thread.start()

    def ended(self) -> str | None:
        """Say how it has ended, if it has."""
        return self._why

    def close(self, seconds: float) -> None:
        """Let it end when all workers have left, or after ``seconds``.

        It is not waited for: the worker that leaves next may be a thread's that waits here.
        """
        timer = threading.Timer(seconds, self.kill)
        timer.daemon = True
        timer.start()

    def kill(self) -> None:
        """Have it end as soon as it looks."""
        self._leaving = True

    def _run(self) -> None:
        try:
            serve = self._config.meet(self._store)
            with contextlib.suppress(RendezvousError):
                serve(lambda: not self._leaving)
        except Exception as error:  # nobody hears it here: the workers do
            self._why = f"{self._config.me} has ended: {error}"
