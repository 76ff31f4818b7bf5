"""Service processes that a worker starts, and their access to the rendezvous store. No torch."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import IO, Any, ClassVar, Protocol

from wingbeat.errors import RendezvousError, WingbeatError
from wingbeat.transport import descriptors
from wingbeat.transport.failures import TERMINATED
from wingbeat.transport.store import Store

_POLL_S = 0.02


class PipeStore:
    """`Store` of a service, until it says that it asks no more. For one thread at a time.

    Args:
        asks: where requests are written.
        hears: where answers come from.
    """

    def __init__(self, asks: IO[str], hears: IO[str]) -> None:
        self._asks, self._hears = asks, hears

    def set(self, key: str, value: str) -> None:
        """Publish ``value`` under ``key``."""
        self._ask({"set": key, "value": value})

    def get(self, key: str, seconds: float) -> str:
        """Wait for ``key``.

        Raises:
            TimeoutError: nobody published it within ``seconds``.
        """
        deadline = time.monotonic() + seconds
        while (value := self._ask({"read": key})) is None:
            if time.monotonic() >= deadline:
                raise TimeoutError(key)
            time.sleep(_POLL_S)
        return str(value)

    def has(self, key: str) -> bool:
        """Whether somebody has published ``key``; does not wait."""
        return self._ask({"read": key}) is not None

    def ready(self) -> None:
        """Tell the one that has started this process that nothing will be asked any more."""
        self._ask({"ready": True})

    def _ask(self, request: dict[str, Any]) -> Any:
        try:
            self._asks.write(json.dumps(request) + "\n")
            self._asks.flush()
            return json.loads(self._hears.readline())
        except (OSError, ValueError):  # nobody reads, or the answer was cut off
            raise TimeoutError("the worker that started this service is gone") from None


def _read(key: str, store: Store) -> str | None:
    try:
        return store.get(key, 1.0) if store.has(key) else None
    except TimeoutError:  # refused, or deleted since: as if it were not there
        return None


def answer(line: str, store: Store) -> tuple[str, bool]:
    """Return the answer to a request, and whether it was the last one.

    Raises:
        ValueError: it is no request.
    """
    try:
        request = json.loads(line)
    except RecursionError:
        raise ValueError("no request: nested too deeply") from None
    match request:
        case {"set": str(key), "value": str(value)}:
            store.set(key, value)
            return "true", False
        case {"read": str(key)}:
            return json.dumps(_read(key, store)), False
        case {"ready": True}:
            return "true", True
    raise ValueError(f"no request: {line[:80]!r}")


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


_PARENT_POLL_S = 0.25


def main(config: Serves) -> None:
    """Meet the workers and serve them, for as long as the one that started this process lives."""
    # An interrupt goes to the whole terminal; it is for the workers to end, and this follows them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A scheduler sends SIGTERM to all processes of a job: workers need this one until they have
    # saved what it holds, and have left.
    terminated = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: terminated.set())
    parent = os.getppid()
    store = PipeStore(sys.stdout, sys.stdin)
    sys.stdout = sys.stderr  # what anything prints is no request
    met = threading.Event()
    threading.Thread(target=_end_with, args=(parent, met), daemon=True).start()
    threading.Thread(target=_end_late, args=(config, terminated), daemon=True).start()
    try:
        serve = config.meet(store)
        if not config.asks_later:
            store.ready()
    except (WingbeatError, TimeoutError) as error:
        sys.exit(str(error))
    met.set()
    serve(lambda: os.getppid() == parent)


def _end_with(parent: int, met: threading.Event) -> None:
    """End this process if the one that started it does before all have met: nobody else will."""
    while not met.wait(_PARENT_POLL_S):
        if os.getppid() != parent:
            os._exit(1)


def _end_late(config: Serves, terminated: threading.Event) -> None:
    """End this process when its workers have not left within the timeout after SIGTERM."""
    terminated.wait()
    time.sleep(config.timeout)
    sys.stderr.write(
        f"{config.me} ends {config.timeout:g} s after SIGTERM: its workers have not left\n"
    )
    sys.stderr.flush()
    os._exit(TERMINATED)
