"""Handles of collectives in progress, and the jobs of each handle."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from wingbeat import _native
from wingbeat.collectives.packing import Packing
from wingbeat.collectives.program import Task
from wingbeat.collectives.threads import run_callback
from wingbeat.errors import PeerError, UsageError
from wingbeat.observe.events import stream
from wingbeat.transport.text import first_line

if TYPE_CHECKING:
    from wingbeat.collectives.native import NativeExecutor
    from wingbeat.collectives.program import Program, Transfer
    from wingbeat.collectives.staging import StagedJob
    from wingbeat.collectives.two_level import TwoLevelJob
    from wingbeat.transport.link import Pending
    from wingbeat.types import Span


class OneShotEvent:
    """A `threading.Event` that cannot be cleared, at a tenth of the cost of creation.

    Each collective has two, and a step may have hundreds of collectives.
    """

    __slots__ = ("_lock", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Set the event. Not safe for concurrent calls; repeated calls have no effect."""
        if not self.is_set:
            self.is_set = True
            self._lock.release()

    def wait(self, seconds: float = -1) -> bool:
        """Block until the event is set or ``seconds`` have passed; return whether it is set."""
        if not self.is_set and self._lock.acquire(timeout=seconds):
            self._lock.release()  # each waiting thread releases the next one
        return self.is_set


FIRST_COMPARISON_S = 1.0
"""Seconds of waiting before the first comparison of calls with peers; doubles after each one."""

MAX_UNINTERRUPTED_S = 0.25
"""Maximum seconds in the extension, during which Python handles no signal."""

_done_lock = threading.Lock()
"""Held briefly while any job is marked as done or a callback is added."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A collective, as all of its members must call it.

    ``label`` names a buffer that is not a bucket. ``identity`` contains everything that must be
    equal on all members of a group. With ``rows``, the program gathers as many copies of the
    buffer, whose sum in the order of ranks is the result.
    """

    buffer: torch.Tensor
    what: str
    bucket: int
    packing: Packing | None = None
    label: str = ""
    identity: str = ""
    rows: int = 0

    @property
    def dtype(self) -> torch.dtype:
        """Dtype on the link."""
        return self.buffer.dtype if self.packing is None else self.packing.dtype


class CallInProgress:
    """A collective in progress on one link: what it is, for messages and traces."""

    def __init__(self, call: Call) -> None:
        self.buffer, self.packing = call.buffer, call.packing
        self.what = call.what.partition(":")[0]
        self.bucket, self.label, self.dtype = call.bucket, call.label, call.dtype
        self.base_tag = 0
        self.turn = 0
        self._error = ""
        self._callbacks: list[Callable[[], None]] = []

    def __str__(self) -> str:
        name = self.what.replace("_", "-")
        if self.bucket >= 0:
            return f"{name} of bucket {self.bucket}"
        return f"{name} of {self.label}" if self.label else name

    @property
    def call(self) -> str:
        """The operation, its size and its dtype on the link, which must be equal on all ranks."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self} ({self.buffer.numel()} elements, {dtype})"


class Job(CallInProgress, Task):
    """One collective on one link, run by Python, with its tensors and transfers in progress."""

    def __init__(self, program: Program, call: Call, after: Job | None) -> None:
        Task.__init__(self, program, after)
        CallInProgress.__init__(self, call)
        self.stalled: Callable[[Job], None] | None = None
        self.begin_ns = 0
        self.coming: deque[tuple[Pending, torch.Tensor]] = deque()
        self.sends: list[tuple[Pending, Transfer, torch.Tensor]] = []
        self.packed: list[torch.Tensor] = []
        self.results: dict[Span, torch.Tensor] = {}
        self._pieces: dict[int, torch.Tensor] | None = None
        self._received, self._done = OneShotEvent(), OneShotEvent()

    def packing_of(self, transfer: Transfer) -> Packing | None:
        """Return the packing of a chunk; chunks within a host are sent as they are."""
        return None if transfer.near else self.packing

    def _cut(self) -> dict[int, torch.Tensor]:
        """Split the buffer into the program's chunks with one call."""
        tiles = self.program.tiles
        if not tiles or self.packing is not None:
            return {}
        sizes = [tile.stop - tile.start for tile in tiles]
        rest = self.buffer.numel() - tiles[-1].stop
        pieces = torch.split_with_sizes(self.buffer, [*sizes, rest])
        return {tile.start: piece for tile, piece in zip(tiles, pieces, strict=False)}

    def piece(self, span: Span) -> torch.Tensor:
        """Return the buffer's chunk at ``span``, one of the program's spans."""
        if self._pieces is None:  # not in __init__: an error must reach the connected members
            self._pieces = self._cut()
        known = self._pieces.get(span.start)
        return self.buffer[span.start : span.stop] if known is None else known

    def receive(self) -> None:
        """Mark the result as readable. Parts of the buffer may still be in transmission."""
        self._received.set()

    def finish(self, error: str = "") -> None:
        """Mark the job as done, or as failed with ``error``, and wake all waiting threads."""
        self._error = error
        self._received.set()
        with _done_lock:
            self._done.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            run_callback(callback)

    def done(self) -> bool:
        """Whether `wait` would return or raise immediately."""
        return self._done.is_set

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the job is done or has failed; immediately if it already is."""
        with _done_lock:
            if not self._done.is_set:
                self._callbacks.append(callback)
                return
        run_callback(callback)

    def drop(self) -> None:
        """Release the references to transfers and tensors."""
        self.coming.clear()
        self.sends.clear()
        self.packed.clear()
        self.results.clear()
        self._pieces = None

    def wait_received(self) -> None:
        """Block until the result can be read. Do not write to it before `wait` returns."""
        self._wait(self._received)

    def wait(self) -> None:
        """Block until done. Every transfer has a deadline, so this returns or raises."""
        self._wait(self._done)

    def _wait(self, event: OneShotEvent) -> None:
        interval = FIRST_COMPARISON_S
        while not event.wait(interval):
            if self.stalled is not None:
                self.stalled(self)
            interval *= 2
        if self._error:  # a new exception each time: a raised one references its frames
            raise PeerError(self._error)


class NativeJob(CallInProgress):
    """One collective on one link, run by the extension.

    ``number`` identifies it in the extension, where ``task`` runs it once it is submitted.
    """

    def __init__(self, program: Program, call: Call, executor: NativeExecutor, number: int) -> None:
        super().__init__(call)
        self.program, self.number = program, number
        self._executor = executor
        self.task: _native.Task
        self._traced = False
        self._traced_before: NativeJob | None = None

    def trace(self, before: NativeJob | None) -> None:
        """Record the job in the event stream, once, when its result is known to be readable.

        So is ``before``, whose result this job needs: nothing else may wait for it.
        """
        self._traced, self._traced_before = True, before
        if not self._executor.expect(self):
            self._record_once()

    def finish(self, error: str) -> None:
        """Note why the job has failed."""
        self._error = self._error or error

    def complete(self) -> None:
        """Call the callbacks, in the thread of completions."""
        if self.task.failed:
            self._executor.lane_failure()
        self._record_once()
        with _done_lock:
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            run_callback(callback)

    def done(self) -> bool:
        """Whether `wait` would return or raise immediately."""
        return self.task.done

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the job is done or has failed; immediately if it already is."""
        with _done_lock:
            if self._executor.expect(self):
                self._callbacks.append(callback)
                return
        run_callback(callback)

    @property
    def awaited(self) -> bool:
        """Whether there are callbacks to call."""
        return bool(self._callbacks)

    def drop(self) -> None:
        """Do nothing: the extension has released the buffer."""

    def wait_received(self) -> None:
        """Block until the result can be read. Do not write to it before `wait` returns."""
        self._wait(sent=False)

    def wait(self) -> None:
        """Block until done. Every transfer has a deadline, so this returns or raises."""
        self._wait(sent=True)
        self._executor.forget(self)

    def _record_once(self) -> None:
        with _done_lock:
            traced, self._traced = self._traced, False
            before, self._traced_before = self._traced_before, None
        if before is not None:
            before._record_once()
        if traced and not self.task.failed:
            nbytes = self.buffer.numel() * self.buffer.element_size()
            stream.record(
                self.what, self.task.begin_ns, self.task.received_ns,
                bucket=self.bucket, nbytes=nbytes, lane=self._executor.name,
            )  # fmt: skip

    def _wait(self, *, sent: bool) -> None:
        begin, compared_after = time.monotonic(), FIRST_COMPARISON_S
        while not self.task.wait(MAX_UNINTERRUPTED_S, sent):
            if time.monotonic() - begin >= compared_after:
                self._executor.compare_apart(self)
                compared_after = 2 * compared_after + FIRST_COMPARISON_S
        if self.task.failed:
            raise PeerError(self._error or self._executor.lane_failure())
        if self._traced:
            self._record_once()


class NcclJob:
    """A collective in a process group, which runs collectives in the order of submission.

    ``finish`` is called in the first wait, with the current stream ordered after the work.
    """

    def __init__(
        self, work: Any, what: str, rank: int, finish: Callable[[], None] | None = None
    ) -> None:
        self._work, self._what, self._rank, self._finish = work, what, rank, finish

    def wait(self) -> None:
        """Wait for the result; on a GPU, make the current stream wait, without blocking the host.

        A `PeerError` if the process group reported a failure.
        """
        try:
            self._work.wait()
        except RuntimeError as err:
            raise PeerError(
                f"rank {self._rank}: {self._what.replace('_', '-')} failed: {first_line(err)}; "
                "find the worker that died or stopped first"
            ) from None
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    def done(self) -> bool:
        """Whether the collective has finished."""
        return bool(self._work.is_completed())

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` if the collective is done; raise a `UsageError` otherwise."""
        if not self.done():
            raise UsageError("a collective on a GPU cannot call back: use wait() or done()")
        run_callback(callback)

    def wait_received(self) -> None:
        """As `wait`."""
        self.wait()

    def write_back(self) -> None:
        """Wait if the buffer receives the result in `wait` only."""
        if self._finish is not None:
            self.wait()


class Handle:
    """A collective in progress on one or more links."""

    __slots__ = ("jobs",)

    def __init__(self, jobs: Sequence[Job | NativeJob | NcclJob | StagedJob | TwoLevelJob]) -> None:
        self.jobs = jobs

    def done(self) -> bool:
        """Whether `wait` would return or raise immediately."""
        return all(job.done() for job in self.jobs)

    def add_done_callback(self, callback: Callable[[Handle], None]) -> None:
        """Call ``callback(handle)`` once, when the collective is done or has failed.

        The callback runs in the thread that completes the collective, so it must be short and must
        not block. If the collective is already done, it runs in the calling thread. Exceptions of
        the callback are logged. A `UsageError` if the collective runs in NCCL or another process
        group, and is not done.
        """
        if not self.jobs:
            run_callback(lambda: callback(self))
            return
        finished = itertools.count(1)

        def one_more(_: Any = None) -> None:
            if next(finished) == len(self.jobs):
                callback(self)

        for job in self.jobs:
            job.add_done_callback(one_more)

    def wait(self) -> None:
        """Block until the collective is done on this worker, or has failed on all links.

        Afterwards the collective no longer reads or writes the buffer. A `PeerError` if a peer
        failed or timed out; names the peer and the collective.
        """
        wait_for_all(job.wait for job in self.jobs)

    def wait_received(self) -> None:
        """Block until the result can be read. Do not write to it before `wait` returns.

        A `PeerError` as in `wait`.
        """
        wait_for_all(job.wait_received for job in self.jobs)


def wait_for_all(waits: Iterable[Callable[[], None]]) -> None:
    """Call every function, then raise the first `PeerError`, if any."""
    first: PeerError | None = None
    for wait in waits:
        try:
            wait()
        except PeerError as error:
            first = first or error
    if first is not None:
        try:
            raise first
        finally:
            del first  # its traceback references this frame
