"""One stream of timed events per worker process, at nearly no cost while it is off.

A caller looks at one attribute before it does anything else, so that an untraced run
spends an attribute lookup and a branch and nothing more:

>>> import time
>>> from wingbeat.observe.events import stream
>>> stream.start(worker=0)
>>> begin = time.monotonic_ns()
>>> if stream.on:
...     stream.record("all_gather", begin, begin + 8_000, bucket=3, nbytes=1 << 20, lane="eth0")
>>> [event] = stream.stop()
>>> event.what, event.bucket, event.end_ns - event.begin_ns
('all_gather', 3, 8000)

All times are from ``time.monotonic_ns()``.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from wingbeat.errors import UsageError

WHATS = (
    "forward",
    "backward",
    "encode",
    "reduce_scatter",
    "all_gather",
    "all_reduce",
    "broadcast",
    "wait",
    "update",
    "step",
    "request",
    "group_wait",
    "average",
    "take_over",
    "left",
    "joined",
)
"""What an event can be. ``wait`` is exposed communication: the main thread was blocked on it.
``encode`` is a codec's work in the thread that runs backward, which it delays. From ``request`` on
they are of models that are averaged: a worker asks for a group, waits until it has one, averages
with it, and takes the average over; another one has left, or joined."""

COLLECTIVES = ("reduce_scatter", "all_gather", "all_reduce", "broadcast")
"""The events that moved bytes."""

AVERAGES = "averages"
"""The lane of what goes on beside training where models are averaged."""

LIMIT = 1_000_000
"""Events kept by default: near 200 MB of memory, hours of a traced run."""

_Row = tuple[str, int, int, int, int, str, tuple[int, ...]]


@dataclass(frozen=True)
class Event:
    """One thing that one worker did.

    ``bucket`` is -1 where no bucket is meant; ``nbytes`` is the size of the buffer worked on (what
    went over a link is the kernel's to count, see `wingbeat lab stats`); ``lane`` is ``compute``,
    ``averages`` or the network interface's name; ``group`` is the ranks that models are averaged
    with, or that have left or joined.
    """

    worker: int
    bucket: int
    what: str
    begin_ns: int
    end_ns: int
    nbytes: int
    lane: str
    group: tuple[int, ...] = ()


_UNTIMED = contextlib.nullcontext()


class Stream:
    """Where a process records its events; normally the module's one ``stream``.

    Any thread may record: an event is one tuple, appended to a list, which CPython does
    atomically. Starting and stopping belong to one thread.

    Raises:
        UsageError: a ``limit`` below 1 event.
    """

    __slots__ = ("_dropped", "_limit", "_rows", "_told", "_worker", "on")

    def __init__(self, limit: int = LIMIT) -> None:
        if limit < 1:
            raise UsageError(f"event limit {limit} is too small; allowed: 1 or more")
        self.on: bool = False
        self._limit = limit
        self._dropped = 0
        self._told = 0
        self._worker = 0
        self._rows: list[_Row] = []

    @property
    def dropped(self) -> int:
        """Events thrown away since ``start`` because the stream was full."""
        return self._dropped

    def start(self, worker: int) -> None:
        """Forget what was recorded and record from now on, as worker number ``worker``."""
        self._rows = []
        self._dropped = self._told = 0
        self._worker = worker
        self.on = True

    def record(
        self,
        what: str,
        begin_ns: int,
        end_ns: int,
        *,
        bucket: int = -1,
        nbytes: int = 0,
        lane: str = "compute",
        group: tuple[int, ...] = (),
    ) -> None:
        """Append one event; does nothing while the stream is off.

        Names and times are not checked here, where every nanosecond would be one of the training
        loop; ``trace.load`` checks them.
        """
        if not self.on:
            return
        rows = self._rows
        if len(rows) >= self._limit:
            self._dropped += 1
            return
        rows.append((what, begin_ns, end_ns, bucket, nbytes, lane, group))

    def happened(self, what: str, group: tuple[int, ...] = ()) -> None:
        """Append an event of averages that takes no time; nothing while the stream is off."""
        if self.on:
            now = time.monotonic_ns()
            self.record(what, now, now, lane=AVERAGES, group=group)

    def timed(
        self, what: str, *, bucket: int = -1, lane: str = "compute"
    ) -> contextlib.AbstractContextManager[None]:
        """Record how long the block takes, also where it raises; for a training loop's own parts.

        >>> own = Stream()
        >>> own.start(worker=0)
        >>> with own.timed("forward"):
        ...     _ = sum(range(10))
        >>> [event.what for event in own.stop()]
        ['forward']
        """
        # A training loop comes here hundreds of times a step, and mostly for nothing.
        return self._timed(what, bucket, lane) if self.on else _UNTIMED

    @contextlib.contextmanager
    def _timed(self, what: str, bucket: int, lane: str) -> Iterator[None]:
        begin = time.monotonic_ns()
        try:
            yield
        finally:
            self.record(what, begin, time.monotonic_ns(), bucket=bucket, lane=lane)

    def take(self) -> list[Event]:
        """Hand over what was recorded so far, and go on recording if the stream is on.

        Warns (``RuntimeWarning``) where events had to be dropped.
        """
        rows, self._rows = self._rows, []
        lost = self._dropped - self._told
        if lost:
            warnings.warn(
                f"worker {self._worker}: {lost} events were dropped, because the stream keeps "
                f"{self._limit}; take() more often, or trace fewer iterations",
                RuntimeWarning,
                stacklevel=2,
            )
            self._told = self._dropped
        worker = self._worker
        return [
            Event(worker, bucket, what, begin_ns, end_ns, nbytes, lane, group)
            for what, begin_ns, end_ns, bucket, nbytes, lane, group in rows
        ]

    def stop(self) -> list[Event]:
        """Stop recording and hand over what was recorded since ``start`` or the last ``take``."""
        self.on = False
        return self.take()


stream = Stream()
"""The process's own stream."""
