"""Operations of a process group in progress: messages between ranks, and what waits for them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from wingbeat.errors import PeerError
from wingbeat.transport.failures import published_failure
from wingbeat.transport.link import Pending
from wingbeat.transport.text import first_line
from wingbeat.transport.world import World


class ProcessGroupError(PeerError, dist.DistBackendError):  # type: ignore[misc]
    """A peer failed or did not respond; the message names its rank and the operation."""


class Operation(Protocol):
    """What a `Handle` and its substitutes have in common."""

    def wait(self) -> None:
        """Block until done; a `PeerError` if a peer failed."""

    def done(self) -> bool:
        """Whether `wait` would return or raise at once."""

    def add_done_callback(self, callback: Callable[[Any], None], /) -> None:
        """Call ``callback(self)`` when done or failed."""


class Background:
    """An operation that consists of blocking calls; a thread waits if no other does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._finished = self._watched = False
        self._error = ""

    def run(self) -> None:
        """Block until done; a `PeerError` if a peer failed."""
        raise NotImplementedError

    def wait(self) -> None:
        """Block until done; a `PeerError` if a peer failed."""
        with self._lock:
            if not self._finished:
                try:
                    self.run()
                except PeerError as error:
                    self._error = str(error)
                self._finished = True
        if self._error:
            raise PeerError(self._error)

    def done(self) -> bool:
        """As `Operation.done`; starts the thread."""
        if not self._finished and not self._watched:
            self._watched = True
            self.add_done_callback(lambda _: None)
        return self._finished

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """As `Operation.add_done_callback`; ``callback`` may block."""

        def work() -> None:
            with contextlib.suppress(PeerError):
                self.wait()
            callback(self)

        threading.Thread(target=work, name="wingbeat-process-group", daemon=True).start()


class Transfers(Background):
    """Messages to and from other ranks, started together."""

    def __init__(self, rank: int, world: World, what: str, seconds: float) -> None:
        super().__init__()
        self._rank, self._world, self._what = rank, world, what
        self._begin, self._seconds = time.monotonic(), seconds
        self._pending: list[tuple[Pending, int, torch.Tensor]] = []

    def start(self, begin: Callable[..., Pending], flat: torch.Tensor, peer: int, tag: int) -> None:
        """Start one message; ``begin`` is the method of a link."""
        try:
            self._pending.append((begin(flat, peer, tag), peer, flat))
        except RuntimeError as err:  # the connection is already closed
            raise ProcessGroupError(self._explain(peer, err)) from None

    def run(self) -> None:
        """Wait for the messages in turn; a `PeerError` names the first rank that failed."""
        while self._pending:
            pending, peer, _ = self._pending.pop(0)
            left = self._begin + self._seconds - time.monotonic()
            failed = ""
            try:
                pending.wait(max(left, 0.001))
            except RuntimeError as err:
                failed = self._explain(peer, err)
            del pending
            if failed:
                self._pending.clear()
                raise PeerError(failed)

    def _explain(self, peer: int, err: RuntimeError) -> str:
        why = published_failure(self._world.store, peer) or first_line(err)
        seconds = time.monotonic() - self._begin
        return f"rank {self._rank}: rank {peer} failed in {self._what} after {seconds:.1f} s: {why}"


class Several(Background):
    """Several operations as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__()
        self._works = works

    def run(self) -> None:
        """As `Background.run`."""
        for work in self._works:
            work.wait()


class Work(dist.Work):  # type: ignore[misc]
    """An operation in progress.

    ``result`` is what the future returns; ``finish`` computes it from what has arrived. ``seconds``
    limits each wait; 0: the group's timeout. ``what`` names the operation and this rank.
    ``unsettled`` contains the operations whose result has not been written.
    """

    def __init__(
        self,
        operation: Operation | None,
        result: Any,
        finish: Callable[[], object] | None,
        seconds: float,
        what: str,
        unsettled: set[Work],
    ) -> None:
        super().__init__()
        self._operation, self._result = operation, result
        self._finish, self._seconds, self._what = finish, seconds, what
        self._lock = threading.Lock()
        self._future: Any = None
        self._settled, self._unsettled = False, unsettled
        unsettled.add(self)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the result can be read; a `ProcessGroupError` if a peer failed."""
        seconds = timeout.total_seconds() or self._seconds
        if seconds and self._operation is not None:
            done = threading.Event()
            self._operation.add_done_callback(lambda _: done.set())
            if not done.wait(seconds):
                raise ProcessGroupError(
                    f"{self._what} timed out after {seconds:g} s: check that all ranks make the "
                    "same calls, or set a longer timeout"
                )
        self._complete()
        return True

    def _complete(self) -> None:
        try:
            if self._operation is not None:
                self._operation.wait()
        except PeerError as error:
            raise ProcessGroupError(str(error)) from None
        with self._lock:
            if self._finish is not None:
                with torch.inference_mode(False), torch.no_grad():
                    self._finish()
                self._finish = None
        self._settled = True
        self._unsettled.discard(self)

    def is_completed(self) -> bool:
        """Whether `wait` would return or raise at once."""
        return self._operation is None or self._operation.done()

    def is_success(self) -> bool:
        """Whether the result can be read."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """Return the error of a completed operation, or None."""
        if self.is_completed():
            try:
                self._complete()
            except ProcessGroupError as error:
                return error
        return None

    def result(self) -> Any:
        """Return the tensors that hold the result."""
        return self._result

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def get_future(self) -> Any:
        """Return a ``torch.futures.Future``, whose callbacks run in a thread of their own."""
        with self._lock:
            if self._future is not None:
                return self._future
            future = self._future = torch.futures.Future()

        def resolve() -> None:
            try:
                self._complete()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(self._result)

        # Not in the thread that completes collectives: a callback may wait for another one.
        def completed(_: object) -> None:
            threading.Thread(target=resolve, name="wingbeat-future", daemon=True).start()

        # DDP reads the value of a future at once after a wait.
        if self._settled or self._operation is None:
            resolve()
        elif isinstance(self._operation, Background):
            self._operation.add_done_callback(lambda _: resolve())
        else:
            self._operation.add_done_callback(completed)
        return future
