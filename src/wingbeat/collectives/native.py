"""The executor of links over TCP, whose programs run in the extension, and the executors of worlds.

The extension runs collectives without the GIL, from the call until the result. Calls that only
Python can run (low-rank factors, sketched top-k, unusual dtypes) use the same connections, in
another channel.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING

import torch

from wingbeat import _native
from wingbeat.collectives import program as programs
from wingbeat.collectives.executor import (
    CHUNKS_PER_TAG,
    AnyJob,
    Executor,
    SharedFailure,
)
from wingbeat.collectives.handle import MAX_UNINTERRUPTED_S, Call, Job, NativeJob
from wingbeat.collectives.packing import Cast, Packing, encoded_of
from wingbeat.collectives.program import Transfer
from wingbeat.collectives.threads import run_callback
from wingbeat.collectives.waits import CurrentWait, WaitMonitor
from wingbeat.observe import meter
from wingbeat.observe.events import stream
from wingbeat.transport.tcp import GroupLink, TcpLink, lane_channel
from wingbeat.types import Span

if TYPE_CHECKING:
    from wingbeat.collectives.program import Program
    from wingbeat.transport.world import World

NATIVE_DTYPES = {
    torch.float32: 0,
    torch.float64: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.int8: 4,
    torch.uint8: 5,
    torch.int16: 6,
    torch.int32: 7,
    torch.int64: 8,
    torch.bool: 9,
}
"""The numbers of ``enum class Dtype`` in ``native/src/net/arithmetic.h``."""

_NO_BLOCK = Span(0, 0)
_numbers = itertools.count(1)


class _Completions:
    """Runs, in one thread, what waits for jobs that have ended and for lanes that have failed.

    The thread ends with the last lane.
    """

    def __init__(self) -> None:
        self.native = _native.Completions()
        self._jobs: dict[int, NativeJob] = {}
        self._lanes: dict[int, weakref.ref[NativeExecutor]] = {}
        self._closing = threading.RLock()  # the garbage collector may run in its holder

    def watch(self, executor: NativeExecutor, number: int) -> None:
        """Handle failures of the lane ``number`` of ``executor``."""
        with self._closing:
            first = not self._lanes
            self._lanes[number] = weakref.ref(executor)
            if first:
                self.native = _native.Completions()
            serve = functools.partial(self._serve, self.native)
        if first:
            # Not under the lock: the garbage collector may call `release` in the new thread before
            # `start` returns.
            threading.Thread(target=serve, name="wingbeat-completions", daemon=True).start()

    def release(self, number: int) -> None:
        """Remove a lane. Idempotent."""
        with self._closing:
            if self._lanes.pop(number, None) is not None and not self._lanes:
                self.native.close()

    def expect(self, job: NativeJob) -> bool:
        """Have a job's callbacks called at its end; False if it is done."""
        self._jobs[job.number] = job
        if job.task.report():
            return True
        if not job.awaited:
            self._jobs.pop(job.number, None)
        return False

    def _serve(self, native: _native.Completions) -> None:
        while numbers := native.wait():
            for number in numbers:
                job = self._jobs.get(number)
                if job is not None:
                    run_callback(job.complete)
                    self._jobs.pop(number, None)
                    del job
                    continue
                lane = self._lanes.get(number)
                executor = None if lane is None else lane()
                if executor is not None:
                    run_callback(executor.fail_lane)
                del executor


_completions = _Completions()


class NativeExecutor(Executor):
    """An `Executor` whose programs run in the extension where it can run them.

    ``links`` are those of the extension.
    """

    def __init__(
        self, world: World, lane: int, failure: SharedFailure, links: list[_native.Group]
    ) -> None:
        self._jobs: dict[int, NativeJob] = {}
        self._comparing: threading.Thread | None = None
        self._native_wait: CurrentWait | None = None
        self._native_wait_of: tuple[int, int] = (0, 0)
        self._number = next(_numbers)
        _completions.watch(self, self._number)
        self._lane = _native.Lane(
            links, lane_channel(world.channel), programs.RECEIVES_AHEAD, programs.DEPTH,
            CHUNKS_PER_TAG, _completions.native, self._number,
        )  # fmt: skip
        # Buffers of a world that is dropped without `close` are released with the executor.
        self.finalizer = weakref.finalize(self, _end_lane, self._lane, self._number)
        self.finalizer.atexit = False
        _native_executors.add(self)
        self._index = world.rank
        super().__init__(world, lane, failure)

    def submit(self, program: Program, call: Call, after: AnyJob | None) -> AnyJob:
        """As `Executor.submit`."""
        if not _runs_natively(call) or isinstance(after, Job):
            if isinstance(after, NativeJob):
                after.wait()  # rare: only one of two halves has a codec
                after = None
            return super().submit(program, call, after)
        job = NativeJob(program, call, self, next(_numbers))
        own = _NO_BLOCK if call.packing is None else call.packing.own
        previous = after.task if isinstance(after, NativeJob) else None
        with self._condition:
            self._admit(job, call)
            self._drop_done()
            self._jobs[job.number] = job
            try:
                job.task = self._lane.submit(
                    program.native, call.buffer.data_ptr(), NATIVE_DTYPES[call.buffer.dtype],
                    job.base_tag, job.number, previous, _native_packing(call.packing),
                    own.start, own.stop,
                    call.rows, self._index, call.buffer.numel() if call.rows else 0,
                )  # fmt: skip
            except BaseException:  # such as KeyboardInterrupt: `close` waits for no such job
                self._jobs.pop(job.number, None)
                raise
        if stream.on:
            job.trace(after)
        return job

    def _make_monitor(self, world: World) -> WaitMonitor | None:
        """Wait in a group for its timeout only, so that the others continue without a slow one."""
        if world.group is None:
            return super()._make_monitor(world)
        return WaitMonitor(None, self._rank, world.timeout, self, world.responds)

    def expect(self, job: NativeJob) -> bool:
        """Have ``job.complete`` called at the end of the job; False if it is done."""
        return _completions.expect(job)

    def compare_apart(self, job: NativeJob) -> None:
        """As `compare`, in another thread: the store may be behind an interface that has failed."""
        if self._comparing is None or not self._comparing.is_alive():
            self._comparing = threading.Thread(
                target=self.compare, args=(job,), name="wingbeat-compare", daemon=True
            )
            self._comparing.start()

    def _drop_done(self) -> None:
        """Release the buffers of jobs that nothing waited for."""
        for number, job in list(self._jobs.items()):
            if not job.task.done or job.task.failed:  # `fail_lane` needs the job that failed
                return
            self._jobs.pop(number, None)

    def forget(self, job: NativeJob) -> None:
        """Release a job that is done."""
        self._jobs.pop(job.number, None)

    def _begun(self) -> list[AnyJob]:
        return [*super()._begun(), *(job for job in self._submitted_jobs() if not job.task.done)]

    def _submitted_jobs(self) -> list[NativeJob]:
        with self._condition:  # `submit` holds it until the extension has the task
            return list(self._jobs.values())

    @property
    def waiting(self) -> CurrentWait | None:
        """As `Executor.waiting`."""
        if self._waiting is not None:
            return self._waiting
        found = self._lane.waiting()
        if found is None:
            return None
        number, index, peer, link, _, _ = found
        if self._native_wait is None or self._native_wait_of != (number, index):
            # Not the job: it has the buffer and this executor, and nothing ends what is kept here.
            job = str(self._jobs.get(number, "a collective"))
            self._native_wait = CurrentWait(self._ranks[peer], job, self._links[link])
            self._native_wait_of = number, index
        return self._native_wait

    def fail_lane(self) -> None:
        """Determine why the lane failed, and fail everything that uses these links."""
        found = self._lane.failure()
        if found is None:
            return
        number, _, peer, link, seconds, reason = found
        job = self._jobs.get(number)
        if job is None:
            self._fail(self._begun(), RuntimeError(reason))
            return
        why = (self._monitor.why if self._monitor is not None else "") or reason
        lost = self._lost(job, Transfer(peer, Span(0, 0), 0, link=link), seconds, why)
        self._fail([job, *(each for each in self._begun() if each is not job)], lost)

    def lane_failure(self) -> str:
        """Return the reason for which the lane failed."""
        if not self._failure.settled:
            self.fail_lane()
        return self._failure.reason()

    def _fail(self, begun: list[AnyJob], err: Exception) -> None:
        jobs = self._submitted_jobs()
        self._lane.fail()
        super()._fail([*begun, *(job for job in jobs if job not in begun)], err)
        self._jobs.clear()

    def close(self) -> None:
        """As `Executor.close`."""
        self.stop()
        deadline = time.monotonic() + self._timeout
        if not self._abandoned:
            for job in self._submitted_jobs():
                while time.monotonic() < deadline and not job.task.wait(MAX_UNINTERRUPTED_S, True):
                    pass
            if begun := self._begun():
                self._fail(begun, RuntimeError("the executor was closed"))
        super().close()
        self._lane.fail()
        self._jobs.clear()
        _completions.release(self._number)

    def abandon(self) -> None:
        """As `Executor.abandon`; no buffer is written to afterwards."""
        super().abandon()
        self._fail(self._begun(), RuntimeError("abandoned"))


_native_executors: weakref.WeakSet[NativeExecutor] = weakref.WeakSet()


def _end_lane(lane: _native.Lane, number: int) -> None:
    lane.fail()
    _completions.release(number)


def _runs_natively(call: Call) -> bool:
    """Whether the extension can run the call."""
    dtype, packing = call.buffer.dtype, call.packing
    if packing is None:
        return dtype in NATIVE_DTYPES
    if dtype is not torch.float32:
        return False
    encoded = encoded_of(packing)
    return packing.dtype is not dtype if encoded is None else encoded.coding.native is not None


def _native_packing(packing: Packing | None) -> _native.Packing | None:
    if packing is None:
        return None
    if isinstance(packing, Cast):
        return _cast_to(packing.dtype)
    coding, residual = packing.coding.native, packing.residual
    assert coding is not None
    address = 0 if residual is None else residual.data_ptr()
    return _native.EncodedPacking(coding, address, torch.get_num_threads())


def _codec_ns() -> int:
    return sum(ns for *_, ns in _native.codec_work())


meter.codec.sources.append(_codec_ns)


@functools.cache
def _cast_to(dtype: torch.dtype) -> _native.Packing:
    return _native.CastPacking(NATIVE_DTYPES[dtype])


_creating = threading.RLock()
"""Reentrant, because the garbage collector may run in the thread that holds it."""

_executors: weakref.WeakKeyDictionary[World, list[Executor]] = weakref.WeakKeyDictionary()


def executors_of(world: World) -> list[Executor]:
    """Return a world's executors, one per link, which all of its `Collectives` share."""
    with _creating:
        if world not in _executors:
            _executors[world] = executors = _make_executors(world)
            for executor in executors:
                world.on_close(executor.close)
                # A deleted model drops its channel but cannot end the thread.
                weakref.finalize(world, executor.stop)
        return _executors[world]


def _make_executors(world: World) -> list[Executor]:
    failure, lanes = SharedFailure(), range(len(world.links))
    native = [each.native for each in world.links if isinstance(each, (TcpLink, GroupLink))]
    if len(native) == len(lanes):
        return [NativeExecutor(world, lane, failure, native) for lane in lanes]
    return [Executor(world, lane, failure) for lane in lanes]


def _after_fork() -> None:
    """Reset in a forked child, where a thread that no longer exists may have held the lock."""
    global _creating, _completions
    _creating = threading.RLock()
    _completions = _Completions()
    for executor in list(_native_executors):
        executor.finalizer.detach()


os.register_at_fork(after_in_child=_after_fork)
