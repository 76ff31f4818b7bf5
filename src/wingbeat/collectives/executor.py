"""One thread per lane that runs programs in the order in which they were submitted.

What to do next is the `Machine`'s decision; here it is done, on links, with tensors.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from wingbeat.collectives import machine
from wingbeat.collectives.calls import Calls
from wingbeat.collectives.failure import Failure
from wingbeat.collectives.job import Job
from wingbeat.collectives.lost import LostPeer, explain
from wingbeat.collectives.machine import Machine
from wingbeat.collectives.packing import Packing, malformed
from wingbeat.collectives.scratch import Scratch
from wingbeat.collectives.tags import CHUNKS, NEVER_SENT, base_tag, group_tag
from wingbeat.collectives.threads import Threads
from wingbeat.collectives.waits import Waiting, Watch, unwatch, watch
from wingbeat.errors import PeerError
from wingbeat.observe.events import stream
from wingbeat.transport.blame import Blame
from wingbeat.transport.liveness import LONGEST
from wingbeat.transport.meeting import room_of, waits_for
from wingbeat.transport.world import World

if TYPE_CHECKING:
    from wingbeat.collectives.program import Program, Transfer
    from wingbeat.transport.link import Link, Pending
    from wingbeat.types import Span

_counter = itertools.count()

_AT_ONCE = 0.001
"""Seconds to wait for what never comes; gloo's least."""


class Executor:
    """Runs jobs first in, first out; up to `machine.DEPTH` of them overlap.

    Args:
        world: whose links to use.
        lane: its number. Lane i runs programs that use link i alone; the first one also those
            that use several.
        failure: what all lanes of the world share.
        threads: where to get a thread from while there is something to do; None for a thread of
            its own.
    """

    def __init__(
        self, world: World, lane: int, failure: Failure, threads: Threads | None = None
    ) -> None:
        # The thread must not keep the world alive: take from it what it needs.
        self._links: tuple[Link, ...] = world.links
        self._name = world.links[lane].name
        self._ranks = world.ranks
        self._rank = self._ranks[world.rank]
        self._group = world.group
        self._timeout = world.timeout
        room = "" if world.group is None else room_of(world.group)
        self.waiting: Waiting | None = None
        # Members of a group have come to it, and threads of one process live or die together.
        self._watch: Watch | None = None
        if not world.threads and world.group is None and world.size > 1:
            shared = world.store if world.group_store is None else world.group_store()
            self._watch = Watch(shared, self._rank, world.timeout, self)
            watch(self._watch)
        self._blame = Blame(world.store, self._rank, self._ranks[-1] + 1, world.timeout, room)
        self._machine: Machine[Job] = Machine()
        self._wake = threading.Condition()
        self._closing = self._abandoned = False
        self._failure = failure
        self._calls = Calls(world, lane)
        self._submitted = 0
        self._scratch = Scratch()
        self._threads = threads
        self._running, self._runner = False, 0
        self._thread: threading.Thread | None = None
        if threads is None:
            self._thread = threading.Thread(
                target=self._run, name=f"wingbeat-{self._name}-{next(_counter)}", daemon=True
            )
            self._thread.start()

    def submit(
        self,
        program: Program,
        buffer: torch.Tensor,
        what: str,
        bucket: int,
        after: Job | None,
        packing: Packing | None = None,
        label: str = "",
        call: str = "",
    ) -> Job:
        """Queue a program on ``buffer``; each chunk is sent when ``after`` has finished with it.

        With a ``packing``, chunks travel as it packs them. ``label`` says what is exchanged where
        it is no bucket; ``call`` is all that the members of a group must say alike.

        Raises:
            PeerError: an earlier job failed, so that the workers are no longer in step.
        """
        job = Job(program, buffer, what, bucket, after, packing, label)
        with self._wake:
            self._failure.refuse()
            if self._closing:
                over = "wingbeat.shutdown()" if self._group is None else f"{self._group} was closed"
                raise PeerError(f"{job} was started after {over}")
            turn = self._submitted
            world_tag = base_tag(what, bucket, buffer.nbytes, label, turn, job.dtype)
            job.turn = turn
            job.stalled = self._compare if self._group is None else None
            job.base_tag = world_tag if self._group is None else group_tag(call, turn)
            self._submitted += 1
            self._machine.submit(job)
            self._wake.notify_all()
            if self._threads is not None and not self._running:
                self._running = True
                self._threads.start(self._run)
        return job

    def stop(self) -> None:
        """Let the thread end once the queue is empty."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()

    def close(self) -> None:
        """End the thread once the queue is empty; wait for it, unless this is it, in a callback."""
        self.stop()
        if self._abandoned or self._runner == threading.get_ident():
            return
        if self._thread is not None:
            self._thread.join(self._timeout)
        with self._wake:
            self._wake.wait_for(lambda: not self._running, self._timeout)

    def abandon(self) -> None:
        """Let `close` not wait for transfers under way, whose links were closed.

        Gloo ends a transfer of which a part has arrived only at its deadline. Until then the thread
        may write to the buffers of jobs that have begun.
        """
        self._abandoned = True

    def _run(self) -> None:
        self._runner = threading.get_ident()
        try:
            for command in self._machine.commands():
                if isinstance(command, machine.Rest):
                    if not self._wait_for_work():
                        return
                else:
                    self._perform(command)
        except Exception as err:
            self._fail(self._machine.begun(), err)

    def _perform(self, command: machine.TaskCommand[Job]) -> None:
        _PERFORM[type(command)](self, command)

    def _begin(self, command: machine.Begin[Job]) -> None:
        command.task.begin_ns = time.monotonic_ns()

    def _wait_for_work(self) -> bool:
        """Block until there is something to do; False when this thread is not needed any more."""
        with self._wake:
            while not self._machine.waiting:
                if self._closing or self._threads is not None:
                    self._end()
                    return False
                self._wake.wait()
            return True

    def _end(self) -> None:
        if self._watch is not None:  # its world has one thread, which is over
            unwatch(self._watch)
        self._running, self._runner = False, 0
        self._wake.notify_all()

    def _take(self, command: machine.Take[Job]) -> None:
        """Wait for a chunk, and add or keep it."""
        job, transfer = command.task, command.transfer
        pending, into = job.coming.popleft()
        self._await(job, pending, transfer)
        if job.packing is not None:
            self._unpack(job, job.packing, transfer, into)
            self._scratch.give(into)
        elif transfer.reduce:
            job.piece(transfer.span).add_(into)
            self._scratch.give(into)

    def _unpack(self, job: Job, packing: Packing, transfer: Transfer, chunk: torch.Tensor) -> None:
        try:
            packing.unpack(chunk, job.buffer, transfer.span, transfer.reduce, self._scratch)
        except ValueError as err:
            raise self._lost(job, transfer, 0.0, malformed(err)) from None

    def _complete(self, command: machine.Complete[Job]) -> None:
        job = command.task
        if stream.on:
            stream.record(
                job.what,
                job.begin_ns,
                time.monotonic_ns(),
                bucket=job.bucket,
                nbytes=job.buffer.numel() * job.buffer.element_size(),
                lane=self._name,
            )
        job.receive()

    def _drain(self, command: machine.Drain[Job]) -> None:
        job = command.task
        self._await_sends(job)
        for chunk in job.packed:
            self._scratch.give(chunk)
        job.drop()
        job.finish()

    def _await_sends(self, job: Job) -> None:
        """Wait until all is sent. After this no local name refers to the buffer's chunks.

        Whoever waits for the job may look who else refers to its buffer.
        """
        for pending, transfer, _ in job.sends:
            self._await(job, pending, transfer)

    def _announce(self, command: machine.Announce[Job]) -> None:
        job, transfer = command.task, command.transfer
        if job.packing is not None:
            into = self._scratch.take(job.packing.room(transfer.span), job.dtype)
        elif transfer.reduce:
            into = self._scratch.take(len(transfer.span), job.dtype)
        else:
            into = job.piece(transfer.span)
        tag = job.base_tag + transfer.tag % CHUNKS
        try:
            pending = self._links[transfer.link].recv(into, transfer.peer, tag)
        except RuntimeError as err:  # the connection is known to be closed already
            raise self._lost(job, transfer, 0.0, err) from None
        job.coming.append((pending, into))

    def _hand(self, command: machine.Hand[Job]) -> None:
        job, transfer = command.task, command.transfer
        if job.packing is None:
            chunk = job.piece(transfer.span)
        else:
            chunk = self._pack(job, job.packing, transfer.span)
        tag = job.base_tag + transfer.tag % CHUNKS
        try:
            pending = self._links[transfer.link].send(chunk, transfer.peer, tag)
        except RuntimeError as err:
            raise self._lost(job, transfer, 0.0, err) from None
        job.sends.append((pending, transfer, chunk))

    def _pack(self, job: Job, packing: Packing, span: Span) -> torch.Tensor:
        """Pack a part of the buffer into scratch that lives until it is sent.

        What all peers get, the result, is packed once for all of them.
        """
        known = job.results.get(span)
        if known is not None:
            return known
        chunk = self._scratch.take(packing.room(span), job.dtype)
        packing.pack(job.buffer, span, chunk)
        job.packed.append(chunk)
        if packing.own.overlaps(span):
            job.results[span] = chunk
        return chunk

    def _await(self, job: Job, pending: Pending, transfer: Transfer) -> None:
        begin = time.monotonic()
        if self._watch is None:
            try:
                pending.wait(self._timeout)
            except RuntimeError as err:
                raise self._lost(job, transfer, time.monotonic() - begin, err) from None
            return
        peer, link = self._ranks[transfer.peer], self._links[transfer.link]
        self.waiting = Waiting(peer, job, link, transfer.peer)
        try:
            pending.wait((1 + LONGEST) * self._timeout)
        except RuntimeError as err:
            # No name for either: the frame would keep the transfer, and gloo its connections.
            lasted = time.monotonic() - begin
            raise self._lost(job, transfer, lasted, self._watch.why or err) from None
        finally:
            self.waiting = None

    def _lost(self, job: Job, transfer: Transfer, seconds: float, err: Exception | str) -> LostPeer:
        return LostPeer(job, transfer, self._ranks[transfer.peer], seconds, err)

    def _fail(self, begun: list[Job], err: Exception) -> None:
        """Fail everything that is begun or queued: after this the workers are out of step."""
        if self._failure.claim():
            try:
                reason = self._reason(begun, err)
            except Exception as other:  # all lanes wait for a reason, and whoever waits for them
                reason = f"rank {self._rank}: a collective failed: {err!r} ({other!r})"
            self._failure.settle(reason)
        else:
            self._break(begun, err)
        reason = self._failure.reason()
        with self._wake:
            waiting = [*begun, *self._machine.drop_waiting()]
        for job in waiting:
            job.finish(reason)
        with self._wake:
            self._end()

    def _compare(self, job: Job) -> None:
        """Called by a thread that waits for ``job`` for long: end it if a peer runs another one.

        Messages of two that differ never meet, and both ranks would wait until their deadline.
        """
        if not self._differing(job):
            return
        for transfer in job.program.transfers():
            # The thread of this lane may wait in gloo for a message. One that waits in vain ends
            # all other waits of its gloo group, in whatever thread.
            link = self._links[transfer.link]
            with contextlib.suppress(RuntimeError):
                link.recv(torch.empty(1), transfer.peer, NEVER_SENT).wait(_AT_ONCE)
            link.close()

    def _differing(self, job: Job) -> str:
        """Return what to say of a peer that is in another collective; empty if none is."""
        calls = {each.turn: each.call for each in (*self._machine.begun(), job)}
        peers = sorted({self._ranks[transfer.peer] for transfer in job.program.transfers()})
        found = self._calls.compare(calls, peers)
        if found is None:
            return ""
        peer, mine, theirs = found
        self._blame.publish(peer, str(job))
        return (
            f"rank {self._rank}: rank {peer} was in {theirs} while this rank waited for it in "
            f"{mine} on interface {self._name}: all ranks must make the same calls, in the same "
            "order, with buffers of the same size and dtype"
        )

    def _reason(self, begun: list[Job], err: Exception) -> str:
        if self._abandoned:  # no peer has failed
            self._break(begun, err)
            return f"rank {self._rank}: {self._group or 'the world'} was given up here"
        if isinstance(err, LostPeer) and self._group is None and (said := self._differing(err.job)):
            self._break(begun, err)
            return said
        if isinstance(err, LostPeer):
            return str(self._explain(begun, err))
        reason = f"rank {self._rank}: {begun[0] if begun else 'a collective'} failed: {err!r}"
        if self._group is not None:  # let the other members know, who would wait for this one
            self._blame.publish(self._rank, str(begun[0]) if begun else "")
            self._break(begun, err)
        return reason

    def _break(self, begun: list[Job], err: Exception) -> None:
        """Break the connections; gloo does so when nothing refers to its group any more."""
        for job in begun:
            job.drop()
        # So do the frames in which the transfer failed.
        err.__traceback__ = err.__context__ = None
        used = {transfer.link for job in begun for transfer in job.program.transfers()}
        # The lanes of a group fail together: its buffers are not written to after that.
        for link in used if self._group is None else range(len(self._links)):
            self._links[link].close()

    def _explain(self, begun: list[Job], lost: LostPeer) -> PeerError:
        if self._group is not None and lost.seconds < self._timeout / 2:
            # Who has waited that long was kept waiting itself. Asked before this rank breaks its
            # own connections, on which others may be waiting.
            lost.missed_by = waits_for(self._rank, self._group, self._blame)
        self._blame.publish(lost.peer, str(lost.job))
        # Now, so that the others notice and ask while this process can still answer.
        self._break(begun, lost)
        where = f"{lost.job} on interface {self._links[lost.transfer.link].name}"
        return explain(self._blame, self._rank, lost, where, self._group)


_PERFORM: dict[type, Callable[[Executor, Any], None]] = {
    machine.Begin: Executor._begin,
    machine.Announce: Executor._announce,
    machine.Take: Executor._take,
    machine.Hand: Executor._hand,
    machine.Complete: Executor._complete,
    machine.Drain: Executor._drain,
}
"""Who performs a command. A ``match`` would look at one class after the other, for each message."""
