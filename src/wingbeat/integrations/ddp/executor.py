"""The one thread that issues a state's collectives, so that all workers issue them in one order.

DDP calls a hook as buckets fill up, in the same order on every worker. A hook with two collectives
for each bucket that issued the second when the first is done would leave the order of the seconds
to chance, and workers that disagree wait for each other for ever. Here a bucket is begun when the
one before it is done; only its encoding, which needs nobody else, is done in advance.
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
"""Seconds that closing waits for a collective under way."""


@dataclass(eq=False)
class HookJob:
    """A bucket to exchange.

    Attributes:
        exchange: what to do.
        where: the bucket, for messages.
        buffer: the bucket's, which gets the result.
        ready: on a GPU, what the buffer's content waits for.
        done: completed with the buffer, or with an error.
        prepared: whether the part that needs no other worker is done.
        error: what went wrong in that part.
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
        """Return what DDP waits for; an error reaches it as an error, not as a value."""
        then: torch.futures.Future[Tensor] = self.done.then(_value_or_raise)
        return then


def _value_or_raise(done: torch.futures.Future[Any]) -> Tensor:
    value = done.value()
    if isinstance(value, Exception):
        raise value
    found: Tensor = value
    return found


class Executor:
    """Runs jobs first in, first out, on a thread of its own. On a GPU, on a stream of its own.

    Attributes:
        error: the first failure. The workers' order of collectives is lost with it, so everything
            after it fails too.
    """

    def __init__(self, rank: int) -> None:
        self.error: Exception | None = None
        self._rank = rank
        self._jobs: queue.SimpleQueue[HookJob | None] = queue.SimpleQueue()
        self._ahead: list[HookJob | None] = []
        self._streams: dict[torch.device, Any] = {}
        self._closed = False
        # A daemon: a collective that nobody answers must not keep a program from ending.
        self._thread = threading.Thread(target=self._loop, name="wingbeat-ddp-hook", daemon=True)
        self._thread.start()

    def submit(self, job: HookJob) -> None:
        """Have ``job`` done after all that were submitted before it."""
        assert not self._closed, "closed"
        self._jobs.put(job)

    def close(self) -> None:
        """End the thread after the jobs under way, waiting a little. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        if threading.current_thread() is not self._thread:  # else called by a garbage collection
            self._thread.join(PATIENCE)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    # -- on the thread --------------------------------------------------------------------------

    def _loop(self) -> None:
        with torch.no_grad():
            while self._one():
                pass

    def _one(self) -> bool:
        """Do the next job; False at the end. A call of its own, so that no job is kept alive."""
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
        """Encode the next bucket while this one is on its way; no more, as payloads take memory."""
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
