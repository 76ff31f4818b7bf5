"""Collectives of device tensors on two levels: inside each host, and between hosts.

::

    group's thread     agree, reduce-scatter in the host  ...  wait, agree, all-gather in the host
    column's thread                               the sum of the shard

A buffer is reduce-scattered between the devices of a host by torch's process group of the device
(`wingbeat.transport.host_group`). Each rank's shard, 1/L of it with L ranks on each host, is summed
in its *column*: the ranks with the same place on the other hosts. Those travel in pinned memory and
wingbeat's connections (`wingbeat.collectives.staging`). An all-gather inside the host completes the
buffer. Everything is ordered on streams.

**Blocks.** Rank r owns block r of P, as everywhere. A host's rank at place l gets the blocks of the
ranks at place l of all hosts, so blocks are copied into the order of places before a
reduce-scatter, and back after an all-gather. An all-reduce has no owners: its shards are
contiguous.

**Order.** A process group runs collectives in the order in which it is given them, which must be
the same on all of its ranks. It is the order of calls, in which a reduce-scatter and an all-reduce
begin with a sum inside the host, and an all-gather has the gather at its place. The gathers of
all-reduces and of gathered payloads, whose column would hold up the next bucket, come together at
the first wait for one of them, or before the next call of another kind: callers start all buckets
of a backward before they wait for one.

**Agreement.** Before each collective of the group the ranks of the host compare, over wingbeat's
connections, which one it is and whether their columns have failed. A rank that is missing, failed,
or at another call is named, and the device is given nothing that could not end.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

import torch

from wingbeat.codecs import Coding
from wingbeat.collectives import staging
from wingbeat.collectives.handle import Handle, OneShotEvent
from wingbeat.collectives.packing import Encoded, WireFormat, encoded_of
from wingbeat.collectives.pinned import Copies, HostOperation, on_stream
from wingbeat.collectives.threads import SerialQueue, ThreadPool
from wingbeat.errors import PeerError
from wingbeat.topologies import Hierarchical
from wingbeat.transport.host_group import HostGroup
from wingbeat.transport.text import first_line
from wingbeat.transport.world import World
from wingbeat.types import SERIES, Group, Layout, Span

if TYPE_CHECKING:
    from wingbeat.collectives.engine import Collectives

_threads = ThreadPool("wingbeat-two-level")

_FIRST_EPOCH = (1 << 20) * SERIES
"""Of the groups of hosts and columns, whose series no other component uses."""

DTYPES = frozenset(
    {
        torch.float32, torch.float64, torch.float16, torch.bfloat16,
        torch.uint8, torch.int8, torch.int32, torch.int64,
    }
)  # fmt: skip
"""Those of NCCL."""

_SCATTER, _GATHER = 1, 2
_STEPS = {_SCATTER: "reduce-scatter", _GATHER: "all-gather"}


def columns_of(layout: Layout) -> list[tuple[int, ...]]:
    """Return the ranks at each place of the hosts, which have equal numbers of workers.

    >>> columns_of(Layout([0, 0, 1, 1]))
    [(0, 2), (1, 3)]
    """
    return [tuple(sorted(column)) for column in zip(*layout.hosts, strict=True)]


class TwoLevelJob(HostOperation):
    """A collective on two levels in progress.

    Attributes:
        number: of the call.
        scratch: what the group reduces and gathers in place; None: copies, in the order of places.
        shard: this rank's part of the host's sum, on the device.
        coded: the encoding of the shard, with this rank's part of the residual; None if there is
            no codec.
        handle: the collective on the shard in the column, once it is submitted.
        superseded: whether a chained half follows, which writes the whole buffer.
    """

    def __init__(
        self,
        parent: TwoLevel,
        what: str,
        buffer: torch.Tensor,
        bucket: int,
        wire: WireFormat | None,
        label: str,
        after: TwoLevelJob | None,
        number: int,
    ) -> None:
        super().__init__(parent.copies, what, parent.copies.ready())
        self.buffer, self.bucket, self.wire, self.label = buffer, bucket, wire, label
        self.after, self.number, self.superseded = after, number, False
        self.scratch: torch.Tensor | None = None
        self.shard: torch.Tensor
        self.coded: Encoded | None = None
        self.handle: Handle | None = None
        self.scattered, self.submitted = OneShotEvent(), OneShotEvent()
        self.summed: torch.Event
        self.lock_of_result = threading.Lock()
        self._parent = parent

    def __str__(self) -> str:
        name = self.what.replace("_", "-")
        if self.bucket >= 0:
            return f"{name} of bucket {self.bucket}"
        return f"{name} of {self.label}" if self.label else name

    def wait(self) -> None:
        """As `HostOperation.wait`. Gathers that were put off begin first."""
        self._parent.begin_gathers(self)
        super().wait()

    def supersede(self) -> None:
        """Leave the copy of the result to the chained half, unless it has begun."""
        with self.lock_of_result:
            self.superseded = True

    def fail(self, error: Exception) -> None:
        """End with an error, unless it has ended."""
        if not self.done():
            self._fail(error)

    def complete(self, written: torch.Event | None) -> None:
        """End with a result that the buffer has after ``written``."""
        self._written = written
        self._complete()


class TwoLevel:
    """The collectives on two levels of a world, in the order of calls."""

    def __init__(
        self,
        world: World,
        group: HostGroup,
        device: torch.device,
        topology: Hierarchical,
        collectives: type[Collectives],
    ) -> None:
        self.device, self.topology = device, topology
        self.copies = Copies(device)
        self._rank, self._size, self._group = world.rank, world.size, group
        self._me, self._ranks = world.me, world.ranks
        columns, host = columns_of(world.layout), world.layout.host_of[world.rank]
        self._order = [rank for column in columns for rank in column]
        self._place = [self._order.index(rank) for rank in range(world.size)]
        job, epoch = world.parent or world, _FIRST_EPOCH + world.serial + bool(world.channel)
        self._inside = job.open_group(Group(world.layout.hosts[host], epoch))
        between = job.open_group(Group(columns[group.place], epoch))
        staging.stage_in_order(between)
        self._host, self._block = self._inside.ranks, between.rank
        self._column_ranks = columns[group.place]
        self._codings: weakref.WeakKeyDictionary[Coding, Coding] = weakref.WeakKeyDictionary()
        self._steps = collectives(self._inside)
        self._column = collectives(between, "mesh" if topology.direct else "ring")
        self._stream, self._stream_of_column = torch.Stream(device), torch.Stream(device)
        self._group_queue, self._column_queue = SerialQueue(_threads), SerialQueue(_threads)
        self._lock = threading.Lock()
        self._put_off: list[TwoLevelJob] = []
        self._running: set[TwoLevelJob] = set()  # unreferenced cycles are collected
        self._calls = 0
        self._broken = ""
        world.on_close(self._inside.close)
        world.on_close(between.close)
        world.on_closed(lambda: self._close_group(world.timeout))

    def fits(self, what: str, buffer: torch.Tensor, wire: WireFormat | None) -> bool:
        """Whether a collective can be done on two levels: the same on all workers."""
        if what not in ("all_reduce", "reduce_scatter", "all_gather") or buffer.numel() == 0:
            return False
        any_length = what == "all_reduce" and encoded_of(wire) is None
        whole = any_length or buffer.numel() % self._size == 0
        return whole and buffer.device == self.device and buffer.dtype in DTYPES

    # -- the calling thread ---------------------------------------------------------------

    def start(
        self,
        what: str,
        buffer: torch.Tensor,
        bucket: int,
        wire: WireFormat | None,
        label: str,
        after: Handle | None,
        put_off: bool,
    ) -> TwoLevelJob:
        """Start a collective that `fits`. The calling thread records an event and does not wait.

        ``after``: the first half on the same buffer; one that was done in another way is waited
        for. ``put_off``: whether the gather inside the host may begin at the first wait.
        """
        first = None if after is None or not after.jobs else after.jobs[0]
        if not isinstance(first, TwoLevelJob) or first.buffer.data_ptr() != buffer.data_ptr():
            first = None
            if after is not None:
                after.wait()
        with self._lock:
            self._calls += 1
            job = TwoLevelJob(self, what, buffer, bucket, wire, label, first, self._calls)
            self._running.add(job)
            job.add_done_callback(self._running.discard)
            if first is not None:
                first.supersede()
            if not put_off:
                self._begin_gathers()
            if what != "all_gather":
                self._group_queue.start(lambda: self._scatter(job))
            self._column_queue.start(lambda: self._submit(job))
            if put_off:
                self._put_off.append(job)
            elif what == "all_gather":
                self._group_queue.start(lambda: self._gather(job))
        return job

    def begin_gathers(self, job: TwoLevelJob) -> None:
        """Begin the gathers that were put off, if this job's is one of them."""
        with self._lock:
            if job in self._put_off:
                self._begin_gathers()

    def _begin_gathers(self) -> None:
        for job in self._put_off:
            self._group_queue.start(lambda job=job: self._gather(job))  # type: ignore[misc]
        self._put_off = []

    def _close_group(self, seconds: float) -> None:
        """Destroy the group after the steps that other ranks of the host have agreed to do too.

        The connections are closed, so a step that is not agreed on fails. Torch does not protect a
        group that is destroyed while another thread begins a collective.
        """
        ended = OneShotEvent()
        self._group_queue.start(ended.set)
        if ended.wait(seconds):
            self._group.close()

    # -- the group's thread ---------------------------------------------------------------

    def _scatter(self, job: TwoLevelJob) -> None:
        """Sum inside the host, into this rank's shard."""
        try:
            self._agree(job, _SCATTER)
            with torch.no_grad(), on_stream(self._stream):
                self._stream.wait_event(job.ready)
                self._sum_inside(job)
                job.summed = self._stream.record_event()
        except Exception as error:
            self._break(job, error)
        job.scattered.set()

    def _sum_inside(self, job: TwoLevelJob) -> None:
        buffer, places = job.buffer, self._group.size
        if job.what == "all_reduce" and not isinstance(job.wire, Encoded):
            length = -(-buffer.numel() // places)
            scratch = buffer
            if places * length > buffer.numel():
                scratch = buffer.new_zeros(places * length)
                scratch[: buffer.numel()].copy_(buffer)
            job.scratch, start = scratch, self._group.place * length
            job.shard = scratch[start : start + length]
        else:
            scratch = torch.cat([self._part(buffer, rank) for rank in self._order])
            job.shard = buffer.new_empty(buffer.numel() // places)
            self._take_residual(job)
        self._group.reduce_scatter(job.shard, scratch).wait()
        buffer.record_stream(self._stream)  # also if a later step fails

    def _gather(self, job: TwoLevelJob) -> None:
        """Wait for the column, and gather the shards inside the host."""
        job.submitted.wait()
        try:
            failed = ""
            try:
                if job.handle is None:
                    job.raise_error()
                else:
                    with on_stream(self._stream):
                        job.handle.wait()
            except PeerError as error:
                failed = str(error)
            self._agree(job, _GATHER, failed)
            with torch.no_grad(), on_stream(self._stream):
                self._stream.wait_event(job.ready)
                self._gather_inside(job)
                written = self._stream.record_event()
        except Exception as error:
            self._break(job, error)
        else:
            job.complete(written)

    def _gather_inside(self, job: TwoLevelJob) -> None:
        buffer = job.buffer
        scratch = torch.empty_like(buffer) if job.scratch is None else job.scratch
        self._group.all_gather(scratch, job.shard).wait()
        job.shard.record_stream(self._stream)
        if job.scratch is None:
            torch.cat([self._part(scratch, place) for place in self._place], out=buffer)
        elif scratch is not buffer:
            buffer.copy_(scratch[: buffer.numel()])
        buffer.record_stream(self._stream)
        self._keep_residual(job, self._stream)

    def _part(self, buffer: torch.Tensor, number: int) -> torch.Tensor:
        length = buffer.numel() // self._size
        return buffer[number * length : (number + 1) * length]

    def _agree(self, job: TwoLevelJob, step: int, failed: str = "") -> None:
        """Compare what the ranks of this host do next; a `PeerError` unless all do the same."""
        if self._broken:
            raise PeerError(self._broken)
        rows = torch.zeros(len(self._host), 3, dtype=torch.int64, device="cpu")
        rows[self._group.place] = torch.tensor([step, job.number, int(bool(failed))], device="cpu")
        try:
            self._steps.all_gather(rows.view(-1), label="the next step on this host").wait()
        finally:
            if failed:  # which came first
                raise PeerError(failed)
        own = rows[self._group.place].tolist()
        for rank, row in zip(self._host, rows.tolist(), strict=True):
            if row[2]:
                raise PeerError(
                    f"{self._me}: {job}: the exchange between hosts of rank {rank}, on the same "
                    f"host, failed; see the error of rank {rank}"
                )
            if row != own:
                theirs = _STEPS.get(row[0], f"step {row[0]}")
                raise PeerError(
                    f"{self._me}: the next collective on this host is {_STEPS[step]} {job.number} "
                    f"({job}), and {theirs} {row[1]} on rank {rank}: all ranks must use the "
                    "gradients of all buckets in the same order"
                )

    def _break(self, job: TwoLevelJob, error: Exception) -> None:
        """Fail this job and all later ones: the ranks' calls would no longer agree."""
        if not isinstance(error, PeerError):
            error = PeerError(
                f"{self._me}: {job} failed inside the host, in {self._group.backend}: "
                f"{first_line(error)}; find the worker that died or stopped first"
            )
        self._broken = self._broken or str(error)
        job.fail(error)

    # -- the column's thread --------------------------------------------------------------

    def _submit(self, job: TwoLevelJob) -> None:
        """Submit the column's collective on the shard, in the order of calls."""
        if job.what != "all_gather":
            job.scattered.wait()
        try:
            if not job.done():
                self._submit_now(job)
        except Exception as error:
            job.fail(error)
        job.submitted.set()

    def _submit_now(self, job: TwoLevelJob) -> None:
        column, after = self._column, job.after
        job.after = None
        with torch.no_grad(), on_stream(self._stream_of_column):
            if job.what != "all_gather":
                self._stream_of_column.wait_event(job.summed)
                submit = getattr(column, job.what)
                job.handle = submit(job.shard, bucket=job.bucket, wire=job.coded or job.wire)
            else:
                first = None
                if after is None:
                    self._take_own(job)
                else:
                    after.raise_error()
                    job.shard, job.coded, first = after.shard, after.coded, after.handle
                wire = job.coded or job.wire
                job.handle = column.all_gather(
                    job.shard, bucket=job.bucket, after=first, wire=wire, label=job.label
                )
        if job.what == "reduce_scatter":
            job.handle.add_done_callback(lambda _: self._finish_scatter(job))

    def _take_own(self, job: TwoLevelJob) -> None:
        """Copy this rank's block of the buffer to its place in a new shard."""
        self._stream_of_column.wait_event(job.ready)
        job.shard = job.buffer.new_empty(job.buffer.numel() // self._group.size)
        self._block_of(job.shard, self._block).copy_(self._part(job.buffer, self._rank))
        self._take_residual(job)

    def _block_of(self, shard: torch.Tensor, number: int) -> torch.Tensor:
        length = shard.numel() // len(self._column_ranks)
        return shard[number * length : (number + 1) * length]

    # -- residuals ------------------------------------------------------------------------

    def _take_residual(self, job: TwoLevelJob) -> None:
        """Make the encoding of a shard, with a copy of its part of the residual."""
        if not isinstance(job.wire, Encoded):
            return
        coding, kept = job.wire.coding, job.wire.residual
        length = job.buffer.numel() // self._size
        if coding not in self._codings:
            spans = [Span(rank * length, (rank + 1) * length) for rank in self._column_ranks]
            self._codings[coding] = coding.joined(spans)
        if kept is not None:
            kept = torch.cat([self._part(kept, rank) for rank in self._column_ranks])
        job.coded = Encoded(self._codings[coding], kept)

    def _keep_residual(self, job: TwoLevelJob, stream: torch.Stream) -> None:
        """Write this rank's part of the residual back."""
        if job.coded is None or job.coded.residual is None:
            return
        assert isinstance(job.wire, Encoded)
        assert job.wire.residual is not None
        whole, kept = job.wire.residual, job.coded.residual
        whole.record_stream(stream)
        kept.record_stream(stream)
        for number, rank in enumerate(self._column_ranks):
            self._part(whole, rank).copy_(self._block_of(kept, number))

    # -- the thread that completes the column's collective ----------------------------------

    def _finish_scatter(self, job: TwoLevelJob) -> None:
        """Copy this rank's block of a shard into the buffer, unless a chained half follows."""
        assert job.handle is not None
        written = None
        try:
            with torch.no_grad(), on_stream(self._stream_of_column):
                job.handle.wait()
                with job.lock_of_result:
                    if not job.superseded:
                        self._part(job.buffer, self._rank).copy_(
                            self._block_of(job.shard, self._block)
                        )
                        job.buffer.record_stream(self._stream_of_column)
                        job.shard.record_stream(self._stream_of_column)
                        self._keep_residual(job, self._stream_of_column)
                        written = self._stream_of_column.record_event()
        except Exception as error:
            job.fail(error)
        else:
            job.complete(written)
