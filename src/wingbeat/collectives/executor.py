"""One thread per link that runs programs in the order in which they were submitted."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from wingbeat.collectives.program import Program, Transfer, last_overlap
from wingbeat.collectives.scratch import Scratch
from wingbeat.collectives.tags import CHUNKS, base_tag
from wingbeat.errors import PeerError
from wingbeat.observe.events import stream
from wingbeat.transport.blame import Blame, finished_text
from wingbeat.transport.gloo import first_line
from wingbeat.transport.world import World

if TYPE_CHECKING:
    import torch

    from wingbeat.collectives.packing import Packing
    from wingbeat.transport.link import Pending
    from wingbeat.types import Span

    _Begin = Callable[[torch.Tensor, int, int], Pending]

AHEAD = 128
"""Receives announced before they are needed, so that no peer ever waits for permission. They are
taken in order: in a mesh, as much as the slowest peer is behind the others has to be announced."""

DEPTH = 4
"""Collectives begun at once. One begins when the one before it has handed its last chunk to the
link: then the link never idles, and no chunk queues behind a later collective's."""

_counter = itertools.count()


class Job:
    """One collective on one link."""

    def __init__(
        self,
        program: Program,
        buffer: torch.Tensor,
        what: str,
        bucket: int,
        after: Job | None,
        packing: Packing | None,
        label: str = "",
    ) -> None:
        self.program = program
        self.buffer = buffer
        self.operation = what
        self.what = what.partition(":")[0]
        self.bucket = bucket
        self.label = label
        self.after = after
        self.packing = packing
        self.dtype = buffer.dtype if packing is None else packing.dtype
        self.error: Exception | None = None
        self.base_tag = 0
        self.begin_ns = 0
        self.next_receive = 0
        self.announced: deque[tuple[Pending, torch.Tensor]] = deque()
        self.sends: list[tuple[Pending, int, torch.Tensor]] = []
        self.packed: list[torch.Tensor] = []
        self.results: dict[Span, torch.Tensor] = {}
        self.unsent = len(program.first) + sum(map(len, program.unlocks))
        self.held: deque[tuple[int, Transfer]] = deque()
        self._received = threading.Event()
        self._done = threading.Event()

    def __str__(self) -> str:
        name = self.what.replace("_", "-")
        if self.bucket >= 0:
            return f"{name} of bucket {self.bucket}"
        return f"{name} of {self.label}" if self.label else name

    def gates(self) -> Iterator[tuple[int, Transfer]]:
        """Yield what can be sent at first, each with the chunk of ``after`` that it waits for.

        So a bucket's all-gather begins with the first chunk that its reduce-scatter has finished,
        and the links do not idle between the two.
        """
        receives = self.after.program.receives if self.after is not None else ()
        gated = [(last_overlap(receives, t.span), t) for t in self.program.first]
        yield from sorted(gated, key=lambda pair: pair[0])

    def receive(self) -> None:
        """Mark the result as complete, though parts of the buffer may still be on their way out."""
        self._received.set()

    def finish(self, error: Exception | None = None) -> None:
        """Mark as done, or as failed with ``error``, and wake whoever waits."""
        self.error = error
        self._received.set()
        self._done.set()

    def received(self) -> bool:
        """Whether the result is complete (or the job failed)."""
        return self._received.is_set()

    def wait_received(self) -> None:
        """Block until the result can be read; it must not be written to before `wait` returns."""
        self._received.wait()
        if self.error is not None:
            raise self.error

    def wait(self) -> None:
        """Block until done; every transfer inside has a deadline, so this ends."""
        self._done.wait()
        if self.error is not None:
            raise self.error


class Executor:
    """Runs jobs first in, first out; up to `DEPTH` of them overlap on the link."""

    def __init__(self, world: World, index: int) -> None:
        # The thread must not keep the world alive: take from it what it needs.
        self._link = world.links[index]
        self._rank = world.rank
        self._timeout = world.timeout
        self._blame = Blame(world.store, world.rank, world.size, world.timeout)
        self._queue: deque[Job] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._failure: Exception | None = None
        self._submitted = 0
        self._scratch = Scratch()
        self._thread = threading.Thread(
            target=self._run, name=f"wingbeat-{self._link.name}-{next(_counter)}", daemon=True
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
    ) -> Job:
        """Queue a program on ``buffer``; each chunk is sent when ``after`` has finished with it.

        With a ``packing``, chunks travel as it packs them. ``label`` says what is exchanged where
        it is no bucket.

        Raises:
            PeerError: an earlier job failed, so that the workers are no longer in step.
        """
        job = Job(program, buffer, what, bucket, after, packing, label)
        with self._wake:
            if self._failure is not None:
                raise self._failure
            if self._closing:
                raise PeerError(f"{job} was started after wingbeat.shutdown()")
            job.base_tag = base_tag(what, bucket, buffer.nbytes, label, self._submitted)
            self._submitted += 1
            self._queue.append(job)
            self._wake.notify()
        return job

    def stop(self) -> None:
        """Let the thread end once the queue is empty."""
        with self._wake:
            self._closing = True
            self._wake.notify()

    def close(self) -> None:
        """End the thread once the queue is empty; wait for it."""
        self.stop()
        self._thread.join(self._timeout)

    def _run(self) -> None:
        active: deque[Job] = deque()
        draining: deque[Job] = deque()
        try:
            while self._wait_for_work(active):
                self._begin_more(active)
                self._go_on(active, draining)
        except Exception as err:
            self._fail([*draining, *active], err)

    def _go_on(self, active: deque[Job], draining: deque[Job]) -> None:
        """Take the next chunk of the first job. No job outlives this call in a local name."""
        job = active[0]
        if job.next_receive < len(job.program.receives):
            self._advance(job)
            for later in active:
                if later.after is job:
                    self._release(later)
        if job.next_receive == len(job.program.receives):
            self._receive(active.popleft())
            draining.append(job)
            # Its last chunks may queue behind the next job's: let that one go on first.
            while len(draining) > (1 if active else 0):
                self._drain(draining[0])
                draining.popleft()

    def _wait_for_work(self, active: deque[Job]) -> bool:
        """Block until there is something to do; False when there never will be."""
        with self._wake:
            while not self._queue and not active and not self._closing:
                self._wake.wait()
            return bool(self._queue or active)

    def _begin_more(self, active: deque[Job]) -> None:
        while self._queue and len(active) < DEPTH and not (active and active[-1].unsent):
            job = self._queue.popleft()
            active.append(job)
            job.begin_ns = time.monotonic_ns()
            for _ in range(AHEAD):
                self._announce(job)
            job.held.extend(job.gates())
            self._release(job)

    def _release(self, job: Job) -> None:
        """Send the first chunks that the job before has finished with."""
        before = job.after
        ready = None if before is None or before.received() else before.next_receive
        while job.held and (ready is None or job.held[0][0] < ready):
            self._send(job, job.held.popleft()[1])

    def _advance(self, job: Job) -> None:
        """Take the next chunk, add or keep it, and send on what depends on it."""
        index = job.next_receive
        transfer = job.program.receives[index]
        pending, into = job.announced.popleft()
        self._await(job, pending, transfer.peer)
        if job.packing is not None:
            self._unpack(job, job.packing, transfer, into)
            self._scratch.give(into)
        elif transfer.reduce:
            job.buffer[transfer.span.start : transfer.span.stop].add_(into)
            self._scratch.give(into)
        job.next_receive += 1
        self._announce(job)
        for send in job.program.unlocks[index]:
            self._send(job, send)

    def _unpack(self, job: Job, packing: Packing, transfer: Transfer, chunk: torch.Tensor) -> None:
        try:
            packing.unpack(chunk, job.buffer, transfer.span, transfer.reduce, self._scratch)
        except ValueError as err:
            raise _LostPeer(job, transfer.peer, 0.0, f"sent a malformed chunk: {err}") from None

    def _drain(self, job: Job) -> None:
        self._await_sends(job)
        for chunk in job.packed:
            self._scratch.give(chunk)
        job.packed.clear()
        job.results.clear()
        job.finish()

    def _await_sends(self, job: Job) -> None:
        """Wait until all is sent; nothing refers to the buffer's chunks after this."""
        for pending, peer, _ in job.sends:
            self._await(job, pending, peer)
        job.sends.clear()

    def _receive(self, job: Job) -> None:
        if stream.on:
            nbytes = job.buffer.numel() * job.buffer.element_size()
            stream.record(
                job.what,
                job.begin_ns,
                time.monotonic_ns(),
                bucket=job.bucket,
                nbytes=nbytes,
                lane=self._link.name,
            )
        job.receive()

    def _announce(self, job: Job) -> None:
        index = job.next_receive + len(job.announced)
        if index >= len(job.program.receives):
            return
        transfer = job.program.receives[index]
        if job.packing is not None:
            into = self._scratch.take(job.packing.room(transfer.span), job.dtype)
        elif transfer.reduce:
            into = self._scratch.take(len(transfer.span), job.dtype)
        else:
            into = job.buffer[transfer.span.start : transfer.span.stop]
        pending = self._start(self._link.recv, job, into, transfer)
        job.announced.append((pending, into))

    def _send(self, job: Job, transfer: Transfer) -> None:
        if job.packing is None:
            chunk = job.buffer[transfer.span.start : transfer.span.stop]
        else:
            chunk = self._pack(job, job.packing, transfer.span)
        pending = self._start(self._link.send, job, chunk, transfer)
        job.sends.append((pending, transfer.peer, chunk))
        job.unsent -= 1

    def _start(self, begin: _Begin, job: Job, chunk: torch.Tensor, transfer: Transfer) -> Pending:
        try:
            return begin(chunk, transfer.peer, job.base_tag + transfer.tag % CHUNKS)
        except RuntimeError as err:  # the connection is known to be closed already
            raise _LostPeer(job, transfer.peer, 0.0, first_line(err)) from None

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

    def _await(self, job: Job, pending: Pending, peer: int) -> None:
        begin = time.monotonic()
        try:
            pending.wait(self._timeout)
        except RuntimeError as err:
            raise _LostPeer(job, peer, time.monotonic() - begin, first_line(err)) from None

    def _fail(self, begun: list[Job], err: Exception) -> None:
        """Fail everything that is begun or queued: after this the workers are out of step."""
        if isinstance(err, _LostPeer):
            error = self._explain(begun, err)
        else:
            where = begun[0] if begun else "a collective"
            error = PeerError(f"rank {self._rank}: {where} failed: {err!r}")
        with self._wake:
            self._failure = error
            waiting = [*begun, *self._queue]
            self._queue.clear()
        for job in waiting:
            job.finish(error)

    def _explain(self, begun: list[Job], lost: _LostPeer) -> PeerError:
        self._blame.publish(lost.peer, str(lost.job))
        # Break the connections now, so that the others notice and ask while this process can
        # still answer; gloo does so when nothing refers to its group any more.
        for job in begun:
            job.announced.clear()
            job.sends.clear()
            job.packed.clear()
            job.results.clear()
        # So do the frames in which the transfer failed.
        lost.__traceback__ = lost.__context__ = None
        self._link.close()
        culprit = self._blame.culprit(lost.peer)
        through = "" if culprit == lost.peer else f" (noticed through rank {lost.peer})"
        where = f"{lost.job} on interface {self._link.name}"
        if self._blame.finished(culprit):
            return PeerError(finished_text(self._rank, culprit, where + through))
        theirs = self._blame.doing(culprit)
        if theirs and theirs != str(lost.job):
            return PeerError(
                f"rank {self._rank}: rank {culprit} was in {theirs} while this rank waited for it "
                f"in {where} for {lost.seconds:.1f} s{through}: all ranks must make the same "
                f"calls, in the same order ({lost.reason})"
            )
        return PeerError(
            f"rank {self._rank}: rank {culprit} failed during {where} "
            f"after {lost.seconds:.1f} s{through}: {lost.reason}"
        )


class _LostPeer(Exception):
    """A transfer with ``peer`` failed."""

    def __init__(self, job: Job, peer: int, seconds: float, reason: str) -> None:
        self.job, self.peer, self.seconds, self.reason = job, peer, seconds, reason
