"""Handles of collectives under way, and the jobs that they consist of."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from wingbeat.collectives.machine import Task
from wingbeat.collectives.packing import Packing
from wingbeat.collectives.threads import run_callback
from wingbeat.errors import PeerError

if TYPE_CHECKING:
    from wingbeat.collectives.nccl import NativeJob
    from wingbeat.collectives.program import Program, Transfer
    from wingbeat.transport.link import Pending
    from wingbeat.types import Span


class Latch:
    """As `threading.Event`, which can be cleared too and costs some ten times as much to make.

    A collective has two, and a step of many small buckets hundreds of collectives.
    """

    __slots__ = ("_lock", "is_open")

    def __init__(self) -> None:
        self.is_open = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> None:
        """Let everyone pass. From one thread at a time; a second call changes nothing."""
        if not self.is_open:
            self.is_open = True
            self._lock.release()

    def wait(self, seconds: float = -1) -> bool:
        """Block until it is open, at most for so many ``seconds``; return whether it is."""
        if not self.is_open and self._lock.acquire(timeout=seconds):
            self._lock.release()  # each who has waited lets the next one pass
        return self.is_open


STALLED = 1.0
"""Seconds after which a rank that waits compares its collective with its peers' for the first time;
then after twice as many, and so on."""

_finishing = threading.Lock()
"""Held while a job is marked as done or gets a callback: for all of them, as it is for moments."""


class Job(Task):
    """One collective in one lane: its tensors, and what is under way of them."""

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
        super().__init__(program, after)
        self.buffer = buffer
        self.what = what.partition(":")[0]
        self.bucket = bucket
        self.label = label
        self.packing = packing
        self.dtype = buffer.dtype if packing is None else packing.dtype
        self._error = ""
        self.base_tag = 0
        self.turn = 0
        self.stalled: Callable[[Job], None] | None = None
        self.begin_ns = 0
        self.coming: deque[tuple[Pending, torch.Tensor]] = deque()
        self.sends: list[tuple[Pending, Transfer, torch.Tensor]] = []
        self.packed: list[torch.Tensor] = []
        self.results: dict[Span, torch.Tensor] = {}
        self._pieces: dict[int, torch.Tensor] | None = None
        self._received, self._done = Latch(), Latch()
        self._callbacks: list[Callable[[], None]] = []

    def __str__(self) -> str:
        name = self.what.replace("_", "-")
        if self.bucket >= 0:
            return f"{name} of bucket {self.bucket}"
        return f"{name} of {self.label}" if self.label else name

    @property
    def call(self) -> str:
        """What it is, with its size and the dtype that travels: the same on every rank."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self} ({self.buffer.numel()} elements, {dtype})"

    def _cut(self) -> dict[int, torch.Tensor]:
        """Cut the buffer into the program's chunks, all in one call."""
        tiles = self.program.tiles
        if not tiles or self.packing is not None:
            return {}
        sizes = [tile.stop - tile.start for tile in tiles]
        rest = self.buffer.numel() - tiles[-1].stop
        pieces = torch.split_with_sizes(self.buffer, [*sizes, rest])
        return {tile.start: piece for tile, piece in zip(tiles, pieces, strict=False)}

    def piece(self, span: Span) -> torch.Tensor:
        """Return a chunk of the buffer, one of the program's."""
        if self._pieces is None:  # not before a group's members have met, who are told of errors
            self._pieces = self._cut()
        known = self._pieces.get(span.start)
        return self.buffer[span.start : span.stop] if known is None else known

    def receive(self) -> None:
        """Mark the result as complete, though parts of the buffer may still be on their way out."""
        self._received.open()

    def finish(self, error: str = "") -> None:
        """Mark as done, or as failed for the reason ``error``, and wake whoever waits."""
        self._error = error
        self._received.open()
        with _finishing:
            self._done.open()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            run_callback(callback)

    def done(self) -> bool:
        """Whether `wait` would return at once, or raise."""
        return self._done.is_open

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called when this is done or has failed; at once if it is."""
        with _finishing:
            if not self._done.is_open:
                self._callbacks.append(callback)
                return
        run_callback(callback)

    def drop(self) -> None:
        """Let go of all that is under way."""
        self.coming.clear()
        self.sends.clear()
        self.packed.clear()
        self.results.clear()
        self._pieces = None

    def wait_received(self) -> None:
        """Block until the result can be read; it must not be written to before `wait` returns."""
        self._wait(self._received)

    def wait(self) -> None:
        """Block until done; every transfer inside has a deadline, so this ends."""
        self._wait(self._done)

    def _wait(self, latch: Latch) -> None:
        patience = STALLED
        while not latch.wait(patience):
            if self.stalled is not None:
                self.stalled(self)
            patience *= 2
        self._raise_error()

    def _raise_error(self) -> None:
        """Raise one of its own each time: an error that was raised holds the frames it came by."""
        if self._error:
            raise PeerError(self._error)


class Handle:
    """A collective under way on one or more links."""

    __slots__ = ("jobs",)

    def __init__(self, jobs: Sequence[Job | NativeJob]) -> None:
        self.jobs = jobs

    def done(self) -> bool:
        """Whether `wait` would return, or raise, without waiting."""
        return all(job.done() for job in self.jobs)

    def add_done_callback(self, callback: Callable[[Handle], None]) -> None:
        """Have ``callback(handle)`` called once, when the collective is done or has failed.

        It runs in the thread that finishes the collective, so it must be short and wait for
        nothing; at once, in this one, if all is done already. What it raises is logged.

        Raises:
            UsageError: a library runs the collective by itself, and it is not done yet.
        """
        if not self.jobs:
            run_callback(lambda: callback(self))
            return
        finished = itertools.count(1)

        def one_more() -> None:
            if next(finished) == len(self.jobs):
                callback(self)

        for job in self.jobs:
            job.add_done_callback(one_more)

    def wait(self) -> None:
        """Block until the collective is done on this worker, or has failed on all links.

        Either way nothing reads or writes the buffer any more.

        Raises:
            PeerError: a peer failed or was silent for too long; names it and the collective.
        """
        wait_for_all(job.wait for job in self.jobs)

    def wait_received(self) -> None:
        """Block until the result can be read. It may be written to only after `wait`.

        Raises:
            PeerError: as for `wait`.
        """
        wait_for_all(job.wait_received for job in self.jobs)


def wait_for_all(waits: Iterable[Callable[[], None]]) -> None:
    """Call each, whatever the others raise; then raise what the first has raised, if one has."""
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
            del first  # its traceback holds this frame
