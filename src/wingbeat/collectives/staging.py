"""Collectives on buffers of an accelerator, carried between hosts by wingbeat's own connections.

A buffer crosses a host in pinned memory, on two side streams::

    current stream     ready ...........................................  wait(written)
    out stream         wait(ready), copy to the host, copied
    staging thread     waits for copied, submits the collective
    in stream          wait(ready), copy to the device, written

The calling thread records one event, and never waits for the device. Its `StagedJob.wait` blocks
until the collective has ended on the host and the copy back is queued, and has the current stream
wait for that copy. Buckets overlap: while one is on the network, others are copied.

The staged collectives of a world have a channel of their own, whose order is that of the calls:
they are submitted later than collectives of host memory that were called after them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from wingbeat.collectives.handle import OneShotEvent
from wingbeat.collectives.packing import Encoded, WireFormat, encoded_of
from wingbeat.collectives.threads import SerialQueue, ThreadPool, run_callback
from wingbeat.errors import PeerError, UsageError
from wingbeat.types import Span, blocks_of

if TYPE_CHECKING:
    from wingbeat.collectives.engine import Blocks
    from wingbeat.collectives.handle import Handle
    from wingbeat.transport.world import World

_threads = ThreadPool("wingbeat-staging")


@dataclass(frozen=True, eq=False)
class StagedCall:
    """A collective on device memory, with what `Collectives` passes on for the host's copy."""

    what: str
    buffer: torch.Tensor
    bucket: int
    wire: WireFormat | None
    blocks: Blocks


Submit = Callable[["StagedJob", "Handle | None"], "Handle"]
"""Submits the collective on a job's host buffer, chained to an earlier one."""


class StagedJob:
    """A collective on a device buffer in progress."""

    def __init__(self, staging: Staging, call: StagedCall, after: StagedJob | None) -> None:
        self.call = call
        self.host: torch.Tensor
        self.handle: Handle | None = None
        self.superseded = False
        self.residual: torch.Tensor | None = None
        self._staging, self._after = staging, after
        self._written: torch.Event | None = None
        self._error = ""
        self._known = OneShotEvent()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []

    # -- the calling thread ---------------------------------------------------------------

    def done(self) -> bool:
        """Whether `wait` would return or raise immediately."""
        return self._known.is_set

    def wait(self) -> None:
        """Wait until the result is known, and have the current stream wait for its copy.

        A `PeerError` if a peer failed or timed out.
        """
        self._known.wait()  # each transfer of the collective has a deadline
        if self._error:
            raise PeerError(self._error)
        if self._written is not None:
            torch.accelerator.current_stream(self.call.buffer.device).wait_event(self._written)

    def wait_received(self) -> None:
        """As `wait`."""
        self.wait()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the copy back is queued or the collective has failed."""
        with self._lock:
            if not self._known.is_set:
                self._callbacks.append(callback)
                return
        run_callback(callback)

    def wire_on_host(self) -> WireFormat | None:
        """Return the encoding of the host's buffer, with the host's copy of the residual."""
        wire = self.call.wire
        if isinstance(wire, Encoded) and wire.residual is not None:
            return replace(wire, residual=self.residual)
        return wire

    # -- the staging thread, and those that complete collectives ---------------------------

    def submit(self, submit: Submit, copied: torch.Event | None) -> None:
        """Wait for the copy, and submit the collective on the host's buffer."""
        try:
            if copied is not None:
                copied.synchronize()
            after = self._after
            if after is not None and after.handle is None:
                self.fail(PeerError(after._error))  # the first half was not submitted
                return
            self.handle = submit(self, None if after is None else after.handle)
            self._after = None
            self.handle.add_done_callback(self._finish)
        except Exception as err:
            self.fail(err)

    def _finish(self, handle: Handle) -> None:
        try:
            handle.wait()  # returns immediately
            self._written = self._staging.write_back(self)
            self._complete()
        except Exception as err:
            self.fail(err)

    def fail(self, err: Exception) -> None:
        """End the job with an error, which `wait` raises."""
        self._error = str(err) if isinstance(err, PeerError) else f"{self.call.what}: {err!r}"
        self._complete()

    def _complete(self) -> None:
        with self._lock:
            self._known.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            run_callback(callback)


class Staging:
    """The staged collectives of a world, in the order of calls. One per world."""

    def __init__(self, world: World) -> None:
        """Open a channel; raise a `UsageError` if there is none, as for the world of a group."""
        if world.group is not None:
            raise UsageError(f"{world.group} carries CPU tensors only: copy them to the CPU")
        self.channel = (world.parent or world).open_channel()
        self.rank, self.size = world.rank, world.size
        self._queue = SerialQueue(_threads)
        self._streams: dict[torch.device, tuple[torch.Stream, torch.Stream]] = {}
        self._lock = threading.Lock()
        world.on_close(self.channel.close)

    def start(self, call: StagedCall, after: StagedJob | None, submit: Submit) -> StagedJob:
        """Start a collective. The calling thread records an event, and does not wait."""
        job = StagedJob(self, call, after)
        buffer = call.buffer
        out, into = self._streams_of(buffer.device)
        ready = torch.Event(buffer.device)
        ready.record(torch.accelerator.current_stream(buffer.device))
        into.wait_event(ready)
        copied = None
        if after is None:
            job.host = torch.empty(buffer.numel(), dtype=buffer.dtype, pin_memory=True)
            out.wait_event(ready)
            copied = self._copy_out(job, out)
        else:
            with self._lock:
                after.superseded = True
            job.host, job.residual = after.host, after.residual
        self._queue.start(lambda: job.submit(submit, copied))
        return job

    def _copy_out(self, job: StagedJob, out: torch.Stream) -> torch.Event | None:
        call = job.call
        encoded = encoded_of(call.wire)
        sent = self._sent(call)
        kept = None if encoded is None else encoded.residual
        if not sent and kept is None:
            return None
        with out:
            part = slice(sent.start, sent.stop)
            job.host[part].copy_(call.buffer[part], non_blocking=True)
            if kept is not None:
                job.residual = torch.empty(kept.numel(), dtype=kept.dtype, pin_memory=True)
                job.residual.copy_(kept, non_blocking=True)
            copied = torch.Event(call.buffer.device)
            copied.record(out)
        return copied

    def write_back(self, job: StagedJob) -> torch.Event | None:
        """Queue the copy of the result; return its event, or None if a later half copies it."""
        call = job.call
        _, into = self._streams_of(call.buffer.device)
        encoded, result = encoded_of(call.wire), self._result(call)
        part = slice(result.start, result.stop)
        with self._lock, into:
            if job.superseded:
                return None
            # The allocator must not reuse memory before a copy that nothing waits for is done.
            call.buffer[part].copy_(job.host[part], non_blocking=True)
            call.buffer.record_stream(into)
            if encoded is not None and encoded.residual is not None and job.residual is not None:
                encoded.residual.copy_(job.residual, non_blocking=True)
                encoded.residual.record_stream(into)
            written = torch.Event(call.buffer.device)
            written.record(into)
        return written

    def _own(self, call: StagedCall) -> Span:
        return (call.blocks or blocks_of(call.buffer.numel(), self.size))[self.rank]

    def _sent(self, call: StagedCall) -> Span:
        """Return the part of the buffer that the collective reads."""
        name, _, root = call.what.partition(":")
        if name == "all_gather":
            return self._own(call)
        if name == "broadcast" and int(root) != self.rank:
            return Span(0, 0)
        return Span(0, call.buffer.numel())

    def _result(self, call: StagedCall) -> Span:
        """Return the part of the buffer that the collective writes."""
        return self._own(call) if call.what == "reduce_scatter" else Span(0, call.buffer.numel())

    def _streams_of(self, device: torch.device) -> tuple[torch.Stream, torch.Stream]:
        with self._lock:
            if device not in self._streams:
                self._streams[device] = torch.Stream(device=device), torch.Stream(device=device)
            return self._streams[device]


_stagings: weakref.WeakKeyDictionary[World, Staging] = weakref.WeakKeyDictionary()
_creating = threading.Lock()


def staging_of(world: World) -> Staging:
    """Return a world's staging. The first call opens a channel and must run on every rank.

    A `UsageError` if all channels are in use, or the world is that of a group.
    """
    with _creating:
        made = _stagings.get(world)
    if made is None:
        made = Staging(world)  # not under the lock: workers may be threads of one process
        with _creating:
            _stagings[world] = made
    return made
