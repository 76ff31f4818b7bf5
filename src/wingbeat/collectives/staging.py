"""Collectives on buffers of an accelerator, carried between hosts by wingbeat's own connections.

A buffer crosses a host in pinned memory (`wingbeat.collectives.pinned`). The calling thread records
one event, and never waits for the device. The `wait` of a job blocks until the collective has ended
on the host and the copy back is queued, and has the current stream wait for that copy. Buckets
overlap: while one is on the network, others are copied.

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

from wingbeat.collectives.packing import Encoded, WireFormat, encoded_of
from wingbeat.collectives.pinned import CopiesByDevice, HostOperation, Pair, pinned_like
from wingbeat.errors import UsageError
from wingbeat.types import Span, blocks_of

if TYPE_CHECKING:
    from wingbeat.collectives.engine import Blocks
    from wingbeat.collectives.handle import Handle
    from wingbeat.transport.world import World


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


class StagedJob(HostOperation):
    """A collective on a device buffer in progress.

    Attributes:
        host: the host's copy of the buffer, also of the chained half that follows.
        handle: the collective on it, once it is submitted.
        superseded: whether a chained half follows, which copies the result of both back.
    """

    def __init__(self, staging: Staging, call: StagedCall, after: StagedJob | None) -> None:
        copies = staging.copies.of(call.buffer.device)
        super().__init__(copies, call.what, copies.ready())
        self.call = call
        self.handle: Handle | None = None
        self.superseded = False
        self._lock_of_result = threading.Lock()
        self._after = after
        self.residual: torch.Tensor | None = None
        if after is None:
            self.host: torch.Tensor = pinned_like(call.buffer)
        else:
            self.host, self.residual = after.host, after.residual

    def supersede(self) -> None:
        """Leave the copy of the result to the chained half, unless it has begun."""
        with self._lock_of_result:
            self.superseded = True

    def wire_on_host(self) -> WireFormat | None:
        """Return the encoding of the host's buffer, with the host's copy of the residual."""
        wire = self.call.wire
        if isinstance(wire, Encoded) and wire.residual is not None:
            return replace(wire, residual=self.residual)
        return wire

    def begin(self, submit: Submit) -> Handle:
        """Submit the collective on the host's buffer.

        If the first half could not be submitted, its `PeerError` or `UsageError`.
        """
        after, self._after = self._after, None
        if after is not None and after.handle is None:
            after.raise_error()
        self.handle = submit(self, None if after is None else after.handle)
        return self.handle

    def write_back(self) -> torch.Event | None:
        """Queue the copy of the result; return its event, or None if a later half copies it."""
        with self._lock_of_result:
            return None if self.superseded else super().write_back()


class Staging:
    """The staged collectives of a world, in the order of calls. One per world."""

    def __init__(self, world: World, channel: World | None = None) -> None:
        """Open a channel; raise a `UsageError` if there is none, as for the world of a group.

        With ``channel``, use that one.
        """
        if world.group is not None and channel is None:
            raise UsageError(f"{world.group} carries CPU tensors only: copy them to the CPU")
        self.channel = channel or (world.parent or world).open_channel()
        self.rank, self.size = world.rank, world.size
        self.copies = CopiesByDevice()
        if channel is None:
            world.on_close(self.channel.close)

    def start(self, call: StagedCall, after: StagedJob | None, submit: Submit) -> StagedJob:
        """Start a collective. The calling thread records an event, and does not wait."""
        job = StagedJob(self, call, after)
        out: list[Pair] = []
        if after is not None:
            after.supersede()
        else:
            part = _slice(self._sent(call))
            out = [Pair(call.buffer[part], job.host[part])] if part.start < part.stop else []
        part = _slice(self._result(call))
        job.back = [Pair(call.buffer[part], job.host[part])]
        encoded = encoded_of(call.wire)
        kept = None if encoded is None else encoded.residual
        if kept is not None:
            if job.residual is None:
                job.residual = pinned_like(kept)
                out.append(Pair(kept, job.residual))
            job.back.append(Pair(kept, job.residual))
        job.copies.queue(job, out, lambda: job.begin(submit))
        return job

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


def _slice(span: Span) -> slice:
    return slice(span.start, span.stop)


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


def stage_in_order(group: World) -> None:
    """Let a group carry tensors of accelerators. No collective of host memory may use its world."""
    with _creating:
        _stagings[group] = Staging(group, group)
