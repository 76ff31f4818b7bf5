"""Executors, one per link, which run programs in the order of submission.

A `Machine` yields commands; an executor performs them on links and tensors.
"""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from wingbeat import _native
from wingbeat.collectives import program as programs
from wingbeat.collectives.handle import Call, Job, NativeJob
from wingbeat.collectives.packing import Packing, ScratchPool, malformed_text
from wingbeat.collectives.program import Machine
from wingbeat.collectives.threads import SerialQueue, ThreadPool
from wingbeat.collectives.waits import (
    CallTable,
    CurrentWait,
    WaitMonitor,
    start_monitoring,
    stop_monitoring,
)
from wingbeat.errors import PeerError
from wingbeat.observe.events import stream
from wingbeat.transport.failures import MAX_WAIT_FACTOR, FailureAttribution, finished_peer_text
from wingbeat.transport.link import (
    TAG_BITS,
    aborted_text,
    channel_tag,
    group_prefix,
    member_waiting_for,
)
from wingbeat.transport.text import first_line
from wingbeat.transport.world import World

if TYPE_CHECKING:
    from wingbeat.collectives.program import Program, Transfer
    from wingbeat.transport.link import Link, Pending
    from wingbeat.types import Group, Span


AnyJob = Job | NativeJob


class SharedFailure:
    """The failure of a world's executors, which all report the reason of the first to fail.

    Stores text only, because a raised exception references its frames' buffers and worlds.
    """

    def __init__(self) -> None:
        self._first = threading.Lock()  # never released
        self._reason = Future[str]()

    def claim(self) -> bool:
        """Whether the caller is the first to fail, and must therefore call `settle`."""
        return self._first.acquire(blocking=False)

    def settle(self, reason: str) -> None:
        """Set the reason and wake the threads that wait for it."""
        self._reason.set_result(reason)

    @property
    def settled(self) -> bool:
        """Whether the reason is known."""
        return self._reason.done()

    def reason(self) -> str:
        """Wait for the reason and return it."""
        return self._reason.result()

    def refuse(self) -> None:
        """Raise a `PeerError` after a failure, because workers are no longer synchronized."""
        if self.settled:
            raise PeerError(self.reason())


class LostPeer(Exception):
    """A transfer to or from job rank ``peer`` failed after ``seconds``.

    ``blocked_member`` is a member that failed earlier, while it waited for this rank. This rank has
    delayed the group then, unless the chain of waits ends at a rank that waited for none.
    """

    def __init__(
        self, job: AnyJob, transfer: Transfer, peer: int, seconds: float, err: Exception | str
    ) -> None:
        self.job, self.transfer, self.seconds = job, transfer, seconds
        self.peer = peer
        self.blocked_member: int | None = None
        self.reason = err if isinstance(err, str) else first_line(err)
        super().__init__(self.reason)  # not err, whose frames reference the transfer


def explain_loss(
    attribution: FailureAttribution,
    rank: int,
    lost: LostPeer,
    where: str,
    group: Group | None,
    column: Sequence[int] = (),
) -> PeerError:
    """Return the error for ``lost``, after giving other workers time to publish their failures.

    ``where`` names the collective and the interface. ``column``: the rank of each replica, if these
    exchange.
    """
    if group is not None:
        where = f"{where} in {group}"
    blocked = lost.blocked_member
    if blocked is not None and not attribution.is_cycle(lost.peer):
        blocked = None
    cause = attribution.root_cause(lost.peer) if blocked is None else blocked
    through = f", of replica {column.index(cause)}" if cause in column else ""
    through += "" if cause == lost.peer else f" (noticed through rank {lost.peer})"
    if blocked is None and attribution.has_finished(cause):
        return PeerError(_finished_text(rank, cause, where + through, group))
    if failure := attribution.failure(cause):
        return PeerError(
            f"rank {rank}: rank {cause} failed with {failure}, noticed in {where} "
            f"after {lost.seconds:.1f} s{through}"
        )
    their_operation = attribution.operation(cause)
    if their_operation and their_operation != str(lost.job):
        return PeerError(
            f"rank {rank}: rank {cause} was in {their_operation} while this rank waited for "
            f"it in {where} for {lost.seconds:.1f} s{through}: all {_EVERYONE[group is None]} must "
            f"make the same calls, in the same order ({lost.reason})"
        )
    if group is not None and blocked is not None:
        return PeerError(f"rank {rank}: {aborted_text(group, rank, cause, attribution)}")
    return PeerError(
        f"rank {rank}: rank {cause} failed during {where} "
        f"after {lost.seconds:.1f} s{through}: {lost.reason}"
    )


_EVERYONE = {True: "ranks", False: "members"}


def _finished_text(rank: int, finished: int, waiting_in: str, group: Group | None) -> str:
    if group is None:
        return finished_peer_text(rank, finished, waiting_in)
    return (
        f"rank {rank}: rank {finished} has finished (its script ended, or called sys.exit() or "
        f"wingbeat.shutdown()) while this rank waits for it in {waiting_in}"
    )


class Executor:
    """Runs jobs first in, first out; up to `programs.DEPTH` of them overlap.

    Executor ``lane`` runs the programs of that link; the first executor also runs programs that use
    several links. It has a thread only while there is work.
    """

    def __init__(self, world: World, lane: int, failure: SharedFailure) -> None:
        # The thread must not keep a reference to the world.
        self._links: tuple[Link, ...] = world.links
        self.name = world.links[lane].name
        self._ranks, self._channel = world.ranks, world.channel
        self._rank = self._ranks[world.rank]
        self._group = world.group
        self._explains = world.explains
        self._timeout = world.timeout
        prefix = "" if world.group is None else group_prefix(world.group)
        self._waiting: CurrentWait | None = None
        self._monitor = self._make_monitor(world)
        if self._monitor is not None:
            start_monitoring(self._monitor)
        self._column = world.members
        self._attribution = FailureAttribution(
            world.store, self._rank, max(self._ranks) + 1, world.timeout, prefix
        )
        self._machine: Machine[Job] = Machine()
        self._condition = threading.Condition()
        self._closing = self._abandoned = False
        self._failure = failure
        self._call_table = CallTable(world, lane)
        self._submitted = 0
        self._scratch = ScratchPool()
        self._running, self._runner = False, 0

    def _make_monitor(self, world: World) -> WaitMonitor | None:
        """Not for threads of one process, and most groups: their transfers have timeouts."""
        if world.threads or world.size == 1:
            return None
        if world.group is None:
            return WaitMonitor(world.store, self._rank, world.timeout, self)
        if world.responds is None:
            return None
        return WaitMonitor(None, self._rank, world.timeout, self, world.responds)

    @property
    def waiting(self) -> CurrentWait | None:
        """The current wait: the same object until it ends."""
        return self._waiting

    def submit(self, program: Program, call: Call, after: AnyJob | None) -> AnyJob:
        """Queue a program of ``call``. A chunk is sent when job ``after`` has finished it.

        A `PeerError` if an earlier job failed, or the executor was closed.
        """
        assert after is None or isinstance(after, Job)
        assert not call.rows, "only the extension sums rows"
        job = Job(program, call, after)
        with self._condition:
            self._admit(job, call)
            if self._group is None:
                job.stalled = self.compare
            self._machine.submit(job)
            if not self._running:
                self._running = True
                executor_threads.start(self._run)
        return job

    def _admit(self, job: AnyJob, call: Call) -> None:
        """Give the job its turn and its tags, or raise a `PeerError`."""
        self._failure.refuse()
        if self._closing:
            over = "wingbeat.shutdown()" if self._group is None else f"{self._group} was closed"
            raise PeerError(f"{job} was started after {over}")
        job.turn, job.base_tag = self._submitted, call_tag(call, self._submitted)
        self._submitted += 1

    def _begun(self) -> list[AnyJob]:
        """Return the jobs in progress, oldest first."""
        return list(self._machine.begun())

    def stop(self) -> None:
        """End the thread once the queue is empty, without waiting for it."""
        with self._condition:
            self._closing = True
            if not self._running:
                self._stop_monitoring()

    def close(self) -> None:
        """End the thread once the queue is empty, and wait for it, unless called from it."""
        self.stop()
        if self._abandoned or self._runner == threading.get_ident():
            return
        with self._condition:
            self._condition.wait_for(lambda: not self._running, self._timeout)

    def _stop_monitoring(self) -> None:
        if self._monitor is not None:
            stop_monitoring(self._monitor)

    def abandon(self) -> None:
        """Make `close` not wait for transfers in progress on closed links.

        The thread may write to the buffers of started jobs until these end.
        """
        self._abandoned = True

    def _run(self) -> None:
        self._runner = threading.get_ident()
        try:
            for command in self._machine.commands():
                if isinstance(command, programs.Idle):
                    if self._end_if_idle():
                        return
                else:
                    _PERFORM[type(command)](self, command)
        except Exception as err:
            self._fail(self._begun(), err)

    def _begin(self, command: programs.Begin[Job]) -> None:
        command.task.begin_ns = time.monotonic_ns()

    def _end_if_idle(self) -> bool:
        with self._condition:
            if not self._machine.waiting:
                self._end()
                return True
            return False

    def _end(self) -> None:
        if self._closing or self._failure.settled:
            self._stop_monitoring()
        self._running, self._runner = False, 0
        self._condition.notify_all()

    def _await_chunk(self, command: programs.AwaitChunk[Job]) -> None:
        job, transfer = command.task, command.transfer
        pending, into = job.coming.popleft()
        self._await(job, pending, transfer)
        if (packing := job.packing_of(transfer)) is not None:
            self._unpack(job, packing, transfer, into)
            self._scratch.release(into)
        elif transfer.reduce:
            job.piece(transfer.span).add_(into)
            self._scratch.release(into)

    def _unpack(self, job: Job, packing: Packing, transfer: Transfer, chunk: torch.Tensor) -> None:
        try:
            packing.unpack(chunk, job.buffer, transfer.span, transfer.reduce, self._scratch)
        except ValueError as err:
            raise self._lost(job, transfer, 0.0, malformed_text(err)) from None

    def _complete(self, command: programs.Complete[Job]) -> None:
        job = command.task
        if stream.on:
            stream.record(
                job.what,
                job.begin_ns,
                time.monotonic_ns(),
                bucket=job.bucket,
                nbytes=job.buffer.numel() * job.buffer.element_size(),
                lane=self.name,
            )
        job.receive()

    def _finish(self, command: programs.AwaitSends[Job]) -> None:
        job = command.task
        self._await_sends(job)
        for chunk in job.packed:
            self._scratch.release(chunk)
        job.drop()
        job.finish()

    def _await_sends(self, job: Job) -> None:
        # A separate function: afterwards no local name may reference the buffer's chunks.
        for pending, transfer, _ in job.sends:
            self._await(job, pending, transfer)

    def _post_receive(self, command: programs.PostReceive[Job]) -> None:
        job, transfer = command.task, command.transfer
        if (packing := job.packing_of(transfer)) is not None:
            into = self._scratch.acquire(packing.size_of(transfer.span), job.dtype)
        elif transfer.reduce:
            into = self._scratch.acquire(len(transfer.span), job.buffer.dtype)
        else:
            into = job.piece(transfer.span)
        try:
            pending = self._links[transfer.link].recv(into, transfer.peer, self._tag(command))
        except RuntimeError as err:  # the connection is already closed
            raise self._lost(job, transfer, 0.0, err) from None
        job.coming.append((pending, into))

    def _send(self, command: programs.SendChunk[Job]) -> None:
        job, transfer = command.task, command.transfer
        if (packing := job.packing_of(transfer)) is not None:
            chunk = self._pack(job, packing, transfer.span)
        else:
            chunk = job.piece(transfer.span)
        try:
            pending = self._links[transfer.link].send(chunk, transfer.peer, self._tag(command))
        except RuntimeError as err:
            raise self._lost(job, transfer, 0.0, err) from None
        job.sends.append((pending, transfer, chunk))

    def _tag(self, command: programs.PostReceive[Job] | programs.SendChunk[Job]) -> int:
        tag = command.task.base_tag + command.transfer.tag % CHUNKS_PER_TAG
        return channel_tag(self._channel, tag)

    def _pack(self, job: Job, packing: Packing, span: Span) -> torch.Tensor:
        """Pack a part of the buffer into scratch memory. The final result is packed only once."""
        known = job.results.get(span)
        if known is not None:
            return known
        chunk = self._scratch.acquire(packing.size_of(span), job.dtype)
        packing.pack(job.buffer, span, chunk)
        job.packed.append(chunk)
        if packing.own.overlaps(span):
            job.results[span] = chunk
        return chunk

    def _await(self, job: Job, pending: Pending, transfer: Transfer) -> None:
        begin = time.monotonic()
        if self._monitor is None:
            try:
                pending.wait(self._timeout)
            except RuntimeError as err:
                raise self._lost(job, transfer, time.monotonic() - begin, err) from None
            return
        peer, link = self._ranks[transfer.peer], self._links[transfer.link]
        self._waiting = CurrentWait(peer, job, link)
        try:
            pending.wait((1 + MAX_WAIT_FACTOR) * self._timeout)
        except RuntimeError as err:
            lasted = time.monotonic() - begin
            raise self._lost(job, transfer, lasted, self._monitor.why or err) from None
        finally:
            self._waiting = None

    def _lost(
        self, job: AnyJob, transfer: Transfer, seconds: float, err: Exception | str
    ) -> LostPeer:
        return LostPeer(job, transfer, self._ranks[transfer.peer], seconds, err)

    def _fail(self, begun: list[AnyJob], err: Exception) -> None:
        """Fail all started and queued jobs, because workers are no longer synchronized."""
        if self._failure.claim():
            try:
                reason = self._reason(begun, err)
            except Exception as other:  # other threads wait for a reason
                reason = f"rank {self._rank}: a collective failed: {err!r} ({other!r})"
            self._failure.settle(reason)
        else:
            self._break(begun, err)
        reason = self._failure.reason()
        with self._condition:
            waiting = [*begun, *self._machine.drop_waiting()]
        for job in waiting:
            job.finish(reason)
        with self._condition:
            self._end()

    def compare(self, job: AnyJob) -> None:
        """Fail ``job``, which has waited for long, if a peer runs a different call.

        Messages of different calls never match, so both ranks would wait until their timeouts.
        """
        if not self._differing(job):
            return
        for number in {transfer.link for transfer in job.program.transfers()}:
            self._links[number].abort_waits()
            self._links[number].close()

    def _differing(self, job: AnyJob) -> str:
        """Return the error text for a peer that runs a different collective, or empty."""
        calls = {each.turn: each.call for each in (*self._begun(), job)}
        peers = sorted({self._ranks[transfer.peer] for transfer in job.program.transfers()})
        found = self._call_table.compare(calls, peers)
        if found is None:
            return ""
        peer, mine, theirs = found
        self._attribution.publish_wait(peer, str(job))
        return (
            f"rank {self._rank}: rank {peer} was in {theirs} while this rank waited for it in "
            f"{mine} on interface {self.name}: all ranks must make the same calls, in the same "
            "order, with buffers of the same size and dtype"
        )

    def _reason(self, begun: list[AnyJob], err: Exception) -> str:
        if self._abandoned:  # no peer has failed
            self._break(begun, err)
            return f"rank {self._rank}: {self._group or 'the world'} was abandoned by this rank"
        if isinstance(err, LostPeer) and self._group is None and (text := self._differing(err.job)):
            self._break(begun, err)
            return text
        if isinstance(err, LostPeer):
            return str(self._explain(begun, err))
        reason = f"rank {self._rank}: {begun[0] if begun else 'a collective'} failed: {err!r}"
        if self._group is not None:  # other members would wait for this rank
            self._attribution.publish_wait(self._rank, str(begun[0]) if begun else "")
            self._break(begun, err)
        return reason

    def _break(self, begun: list[AnyJob], err: Exception) -> None:
        """Close the connections, or end the group on them."""
        for job in begun:
            job.drop()
        # The frames in which the transfer failed reference it too.
        err.__traceback__ = err.__context__ = None
        used = {transfer.link for job in begun for transfer in job.program.transfers()}
        # The executors of a group fail together, so that its buffers are not written to afterwards.
        for link in used if self._group is None else range(len(self._links)):
            if self._group is not None:
                self._links[link].abort_waits()
            self._links[link].close()

    def _explain(self, begun: list[AnyJob], lost: LostPeer) -> PeerError:
        if not self._explains:
            self._break(begun, lost)
            return PeerError(
                f"rank {self._rank}: rank {lost.peer} did not complete {lost.job} after "
                f"{lost.seconds:.1f} s: {lost.reason}"
            )
        ended = lost.reason.startswith(_native.CONNECTION_ENDED)
        if self._group is not None and lost.seconds < self._timeout / 2 and not ended:
            # A peer that waited longer was blocked itself. Must precede the closing of this rank's
            # connections, on which others may wait. A lost connection is a cause by itself; others
            # may wait for this rank because the extension has ended the group already.
            lost.blocked_member = member_waiting_for(self._rank, self._group, self._attribution)
        self._attribution.publish_wait(lost.peer, str(lost.job))
        # Peers then detect the failure while this process still runs.
        self._break(begun, lost)
        where = f"{lost.job} on interface {self._links[lost.transfer.link].name}"
        return explain_loss(self._attribution, self._rank, lost, where, self._group, self._column)


_PERFORM: dict[type, Callable[[Executor, Any], None]] = {
    programs.Begin: Executor._begin,
    programs.PostReceive: Executor._post_receive,
    programs.AwaitChunk: Executor._await_chunk,
    programs.SendChunk: Executor._send,
    programs.Complete: Executor._complete,
    programs.AwaitSends: Executor._finish,
}
"""The method of each command. A ``match`` would test the classes in sequence for each message."""


executor_threads = ThreadPool("wingbeat-executor")
"""Run executors while they have work."""
factor_threads = ThreadPool("wingbeat-factors")
"""Computes second factors between the two sums."""
decode_queue = SerialQueue(ThreadPool("wingbeat-decode"))
"""Decodes gathered payloads while backward runs."""


def _after_fork() -> None:
    """Reset in a forked child, which has none of these threads."""
    executor_threads.reset_after_fork()
    factor_threads.reset_after_fork()
    decode_queue.reset_after_fork()


os.register_at_fork(after_in_child=_after_fork)

_CHUNK_BITS = 8
CHUNKS_PER_TAG = 1 << _CHUNK_BITS
"""Chunks to a peer after which tags repeat. Chunks are sent and received in the same order, and an
executor posts fewer receives.
"""

_TURN_BITS = 4
TAG_PERIOD = 1 << _TURN_BITS
"""Collectives after which tags repeat. A sender is less than half as many ahead of a receiver."""

_DIGESTS = 1 << (TAG_BITS - _TURN_BITS - _CHUNK_BITS)


def call_tag(call: Call, turn: int) -> int:
    """Return the tag of a collective's first chunk; the other chunks have the following tags.

    ``turn`` counts earlier collectives. Two different calls have the same tag in one of 524,288
    cases.
    """
    digest = _digest(
        call.what, call.bucket, call.buffer.nbytes, call.label, call.dtype, call.identity
    )
    return (digest << _TURN_BITS | turn % TAG_PERIOD) << _CHUNK_BITS


@lru_cache(maxsize=4096)
def _digest(*call: object) -> int:
    return zlib.crc32(repr(call).encode()) % _DIGESTS
