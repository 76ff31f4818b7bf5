"""Service processes that a worker starts, and their access to the rendezvous store. No torch.

The rendezvous store needs torch and services do not import it. A service sends its store requests
over pipes, as lines of JSON, to the worker that started it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import IO, Any, ClassVar, Protocol

from wingbeat.errors import RendezvousError, WingbeatError
from wingbeat.observe.log import log_to_stderr
from wingbeat.transport import descriptors
from wingbeat.transport.failures import TERMINATED
from wingbeat.transport.store import AtomicStore, Store
from wingbeat.transport.text import first_line

_log = logging.getLogger(__name__)


class BackgroundThread(threading.Thread):
    """A daemon thread that runs ``work`` and stores the exception that ended it.

    ``died`` is called in this thread after ``work`` raised, for example to end a wait. ``failure``
    is one line about the exception; empty while ``work`` has not raised.
    """

    def __init__(
        self, work: Callable[[], None], name: str, died: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._work, self._died = work, died
        self.failure = ""

    def run(self) -> None:
        """Run the work, and store what it raises."""
        try:
            self._work()
        except Exception as error:
            failure = f"thread {self.name} has ended by {type(error).__name__}: {first_line(error)}"
            _log.exception("%s", failure)
            self.failure = f"{failure}; report the traceback in the log, and start the job again"
            self._died()


_POLL_S = 0.02


class PipeStore:
    """`AtomicStore` of a service, over a pipe for requests and one for answers. Thread-safe."""

    def __init__(self, requests: IO[str], answers: IO[str]) -> None:
        self._requests, self._answers = requests, answers
        self._lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        """Publish ``value`` under ``key``."""
        self._request({"set": key, "value": value})

    def get(self, key: str, seconds: float) -> str:
        """Wait for ``key``; a `TimeoutError` after ``seconds``."""
        deadline = time.monotonic() + seconds
        while (value := self._request({"read": key})) is None:
            if time.monotonic() >= deadline:
                raise TimeoutError(key)
            time.sleep(_POLL_S)
        return str(value)

    def has(self, key: str) -> bool:
        """Whether ``key`` is published. Does not wait."""
        return self._request({"read": key}) is not None

    def claim(self, key: str, value: str) -> str:
        """Publish ``value`` unless the key exists; return the published value."""
        found = self._request({"claim": key, "value": value})
        if found is None:
            raise TimeoutError(f"{key}: the store does not answer")
        return str(found)

    def ready(self) -> None:
        """Notify the worker that no further request follows."""
        self._request({"ready": True})

    def _request(self, request: dict[str, Any]) -> Any:
        try:
            with self._lock:
                self._requests.write(json.dumps(request) + "\n")
                self._requests.flush()
                return json.loads(self._answers.readline())
        except (OSError, ValueError):  # the worker has exited, or its answer was cut off
            raise TimeoutError("the worker that started this service has exited") from None


def _read(key: str, store: Store) -> str | None:
    try:
        return store.get(key, 1.0) if store.has(key) else None
    except TimeoutError:  # rejected or deleted: treated as missing
        return None


def _claim(key: str, value: str, store: Store) -> str | None:
    assert isinstance(store, AtomicStore), "a worker's store has claims"
    with contextlib.suppress(TimeoutError):
        return store.claim(key, value)
    return None


def answer_request(line: str, store: Store) -> tuple[str, bool]:
    """Return the answer to a request and whether it was the last; a `ValueError` if malformed."""
    try:
        request = json.loads(line)
    except RecursionError:
        raise ValueError("not a request: nested too deeply") from None
    match request:
        case {"set": str(key), "value": str(value)}:
            store.set(key, value)
            return "true", False
        case {"read": str(key)}:
            return json.dumps(_read(key, store)), False
        case {"claim": str(key), "value": str(value)}:
            return json.dumps(_claim(key, value, store)), False
        case {"ready": True}:
            return "true", True
    raise ValueError(f"not a request: {line[:80]!r}")


_PIPE_DESCRIPTORS = 6
"""Descriptors that are open while a process is started: both ends of three pipes."""


class ServiceConfig(Protocol):
    """Configuration of a service, which runs as ``python -m module`` with `to_json` as argument.

    ``uses_store_later`` is whether it uses the store after it has connected to all workers.
    """

    module: ClassVar[str]
    uses_store_later: ClassVar[bool]

    @property
    def me(self) -> str:
        """Name of the service in messages."""

    @property
    def timeout(self) -> float:
        """Upper limit of each wait in seconds, including the wait for workers after SIGTERM."""

    def to_json(self) -> str:
        """Return the configuration as JSON."""

    def connect(self, store: Store) -> Callable[[Callable[[], bool]], None]:
        """Connect to all workers; return a function that serves while its argument returns True."""


class Service(Protocol):
    """A running service that this worker started."""

    def ended(self) -> str | None:
        """Return how it exited; None while it is running."""

    def close(self, seconds: float) -> None:
        """Wait until it exits, after all workers have left; kill it after ``seconds``."""

    def kill(self) -> None:
        """Kill it at once."""


class ProcessService:
    """A service in its own process; a thread forwards its requests to ``store``."""

    def __init__(self, config: ServiceConfig, store: Store) -> None:
        self._config, self._store = config, store
        descriptors.require(_PIPE_DESCRIPTORS, f"starting {config.me}")
        self._process = subprocess.Popen(
            [sys.executable, "-m", config.module, config.to_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_environment(),
        )
        self._store_thread = threading.Thread(
            target=self._serve_store, name="wingbeat-service", daemon=True
        )
        self._store_thread.start()

    def ended(self) -> str | None:
        """As `Service.ended`."""
        code = self._process.poll()
        if code is None:
            return None
        how = f"by signal {-code}" if code < 0 else f"with exit status {code}"
        return f"{self._config.me} has ended {how}"

    def close(self, seconds: float) -> None:
        """As `Service.close`."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._store_thread.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()

    def kill(self) -> None:
        """As `Service.kill`."""
        self._process.kill()
        self.close(1.0)

    def _serve_store(self) -> None:
        requests, answers = self._process.stdout, self._process.stdin
        assert requests is not None
        assert answers is not None
        try:
            with contextlib.suppress(OSError, ValueError, TimeoutError, RuntimeError):
                self._answer_requests(requests, answers)
        finally:  # unblock a service that waits for an answer
            with contextlib.suppress(OSError):
                answers.close()

    def _answer_requests(self, requests: IO[str], answers: IO[str]) -> None:
        for line in requests:
            text, last = answer_request(line, self._store)
            answers.write(text + "\n")
            answers.flush()
            if last:
                return


def _environment() -> dict[str, str]:
    """Return an environment in which the service imports the same modules as this process.

    ``python -m`` searches the working directory first, always before Python 3.11, and not the
    script's directory.
    """
    places = os.pathsep.join(place or os.getcwd() for place in sys.path)
    return {**os.environ, "PYTHONPATH": places, "PYTHONSAFEPATH": "1"}


class ThreadService:
    """A service in a thread, for workers that are threads themselves. For tests."""

    def __init__(self, config: ServiceConfig, store: Store) -> None:
        self._config, self._store = config, store
        self._outcome: str | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="wingbeat-service", daemon=True)
        self._thread.start()

    def ended(self) -> str | None:
        """As `Service.ended`."""
        return self._outcome

    def close(self, seconds: float) -> None:
        """As `Service.close`, without blocking: the calling thread may be the next to leave."""
        timer = threading.Timer(seconds, self.kill)
        timer.daemon = True
        timer.start()

    def kill(self) -> None:
        """Stop it at its next check."""
        self._stopping = True

    def _run(self) -> None:
        try:
            serve = self._config.connect(self._store)
            with contextlib.suppress(RendezvousError):
                serve(lambda: not self._stopping)
        except Exception as error:  # the workers report it
            self._outcome = f"{self._config.me} has ended: {error}"


_PARENT_POLL_S = 0.25


def run_service(config: ServiceConfig) -> None:
    """Connect to the workers and serve them while the parent process is alive."""
    # The terminal sends an interrupt to all processes. This one exits after its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A scheduler sends SIGTERM to all processes of a job. Workers need this one until they have
    # saved the state and left.
    terminated = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: terminated.set())
    parent = os.getppid()
    log_to_stderr(config.me, leads=False)
    store = PipeStore(sys.stdout, sys.stdin)
    sys.stdout = sys.stderr  # prints must not be parsed as requests
    met = threading.Event()
    threading.Thread(target=_exit_with_parent, args=(parent, met), daemon=True).start()
    threading.Thread(target=_exit_after_timeout, args=(config, terminated), daemon=True).start()
    try:
        serve = config.connect(store)
        if not config.uses_store_later:
            store.ready()
    except (WingbeatError, TimeoutError) as error:
        sys.exit(str(error))
    met.set()
    serve(lambda: os.getppid() == parent)


def _exit_with_parent(parent: int, met: threading.Event) -> None:
    """Exit if the parent process exits before all workers are connected."""
    while not met.wait(_PARENT_POLL_S):
        if os.getppid() != parent:
            os._exit(1)


def _exit_after_timeout(config: ServiceConfig, terminated: threading.Event) -> None:
    """Exit if workers are still connected ``timeout`` seconds after SIGTERM."""
    terminated.wait()
    time.sleep(config.timeout)
    sys.stderr.write(
        f"{config.me} ends {config.timeout:g} s after SIGTERM: its workers have not left\n"
    )
    sys.stderr.flush()
    os._exit(TERMINATED)
