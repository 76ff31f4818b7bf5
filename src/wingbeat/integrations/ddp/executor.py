"""The thread that issues a state's collectives, in the same order on all workers.

DDP calls a hook in the same order of buckets on every worker. If a hook issued the second
collective of a bucket when the first completes, the order would depend on timing, and workers with
different orders would deadlock. Here a bucket begins when the previous one is done; only its
encoding, which does not communicate, runs ahead.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wingbeat.errors import WingbeatError
from wingbeat.integrations.ddp.exchange import HookExchange

PATIENCE = 2.0
"""Seconds that closing waits for a running collective."""


@dataclass(eq=False)
class HookJob:
    """A bucket to exchange.

    ``ready`` is the GPU event after which the buffer is valid. ``done`` completes with the buffer
    or an error. ``prepared`` and ``error`` are the state of the work without communication.
    """

    exchange: HookExchange
    where: str
    buffer: Tensor
    ready: Any = None
    done: Any = None
    prepared: bool = False
    error: Exception | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.device = self.buffer.device
        devices: list[int | str | torch.device] = (
            [self.device] if self.device.type == "cuda" else []
        )
        self.done = torch.futures.Future(devices=devices)
        if devices:
            self.ready = torch.cuda.Event()
            self.ready.record(torch.cuda.current_stream(self.device))

    def future(self) -> torch.futures.Future[Tensor]:
        """Return DDP's future, which propagates an error as an exception."""
        then: torch.futures.Future[Tensor] = self.done.then(_value_or_raise)
        return then


def _value_or_raise(done: torch.futures.Future[Any]) -> Tensor:
    value = done.value()
    if isinstance(value, Exception):
        raise value
    found: Tensor = value
    return found


class Executor:
    """Runs jobs in FIFO order on a thread, and on a GPU on a stream, of its own.

    After ``error``, the first failure, all jobs fail: the workers' order of collectives is lost.
    """

    def __init__(self, rank: int) -> None:
        self.error: Exception | None = None
        self._rank = rank
        self._jobs: queue.SimpleQueue[HookJob | None] = queue.SimpleQueue()
        self._ahead: list[HookJob | None] = []
        self._streams: dict[torch.device, Any] = {}
        self._closed = False
        # A daemon thread, so that a blocked collective cannot keep the program from exiting.
        self._thread = threading.Thread(target=self._loop, name="wingbeat-ddp-hook", daemon=True)
        self._thread.start()

    def submit(self, job: HookJob) -> None:
        """Queue ``job``."""
        assert not self._closed, "closed"
        self._jobs.put(job)

    def close(self) -> None:
        """Stop the thread after the running jobs, with a timeout. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        if threading.current_thread() is not self._thread:  # else called by garbage collection
            self._thread.join(PATIENCE)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def alive(self) -> bool:
        """Whether the thread is running."""
        return self._thread.is_alive()

    # -- on the thread --------------------------------------------------------------------------

    def _loop(self) -> None:
        with torch.no_grad():
            while self._one():
                pass

    def _one(self) -> bool:
        """Run the next job; False at the end. A separate frame, so that no job is kept alive."""
        job = self._ahead.pop() if self._ahead else self._jobs.get()
        if job is None:
            return False
        with self._stream(job):
            try:
                if self.error is not None:
                    raise self.error
                self._prepare(job)
                if job.error is not None:
                    raise job.error
                result: Any = job.exchange.run(self._prepare_next)
            except Exception as err:
                result = self.error = self._named(err, job)
            job.done.set_result(result)
        return True

    def _prepare(self, job: HookJob) -> None:
        if job.prepared:
            return
        job.prepared = True
        try:
            if job.ready is not None:
                stream = torch.cuda.current_stream(job.device)
                stream.wait_event(job.ready)
                job.buffer.record_stream(stream)
            job.exchange.prepare()
        except Exception as err:
            job.error = err

    def _prepare_next(self) -> None:
        """Encode only the next bucket during communication, because payloads need memory."""
        if self._ahead:
            return
        try:
            job = self._jobs.get_nowait()
        except queue.Empty:
            return
        self._ahead.append(job)
        if job is not None:
            with self._stream(job):
                self._prepare(job)

    @contextlib.contextmanager
    def _stream(self, job: HookJob) -> Iterator[None]:
        if job.device.type != "cuda":
            yield
            return
        if job.device not in self._streams:
            self._streams[job.device] = torch.cuda.Stream(job.device)
        with torch.cuda.stream(self._streams[job.device]):
            yield

    def _named(self, err: Exception, job: HookJob) -> Exception:
        if isinstance(err, WingbeatError):
            return err
        return WingbeatError(f"rank {self._rank}: {job.where}: {type(err).__name__}: {err}")
