"""A stream of timed events per worker process, with almost no cost while it is off.

Callers check one attribute first, so an untraced run costs an attribute lookup and a branch:

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

COLLECTIVES = ("reduce_scatter", "all_gather", "all_reduce", "broadcast")
"""The events that move bytes."""

WHATS = (
    *("forward", "backward", "encode", *COLLECTIVES, "wait", "update", "step"),
    *("request", "group_wait", "average", "take_over", "left", "joined"),
)
"""Names of events.

``wait`` is exposed communication: the main thread was blocked on it. ``encode`` is encoding in the
thread that runs backward. The names from ``request`` on belong to model averaging: a worker
requests a group, waits for it, averages with it and applies the average; another worker has left
or joined.
"""

AVERAGES = "averages"
"""The lane of model averaging, which overlaps with training."""

LIMIT = 1_000_000
"""Default maximum of events: about 200 MB of memory, hours of a traced run."""

_Row = tuple[str, int, int, int, int, str, tuple[int, ...]]


@dataclass(frozen=True)
class Event:
    """One timed action of one worker.

    ``bucket`` is -1 if no bucket applies. ``nbytes`` is the size of the buffer; `wingbeat lab
    stats` has the bytes on the network, as counted by the kernel. ``lane`` is ``compute``,
    ``averages`` or the name of a network interface. ``group`` is the ranks that average, or that
    have left or joined.
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
    """Records the events of a process; normally the module's ``stream`` is used.

    Any thread may record: CPython appends a tuple to a list atomically. One thread starts and
    stops. ``dropped`` counts events since ``start`` that were dropped, because the stream holds
    only ``limit``. Raises UsageError if that is below 1.
    """

    __slots__ = ("_limit", "_rows", "_warned", "_worker", "dropped", "on")

    def __init__(self, limit: int = LIMIT) -> None:
        if limit < 1:
            raise UsageError(f"event limit {limit} is too small; allowed: 1 or more")
        self.on: bool = False
        self._limit = limit
        self.dropped = self._warned = 0
        self._worker = 0
        self._rows: list[_Row] = []

    def start(self, worker: int) -> None:
        """Clear the stream and start to record, as worker number ``worker``."""
        self._rows = []
        self.dropped = self._warned = 0
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

        Names and times are not checked here, to keep the cost low; ``trace.load`` checks them.
        """
        if not self.on:
            return
        rows = self._rows
        if len(rows) >= self._limit:
            self.dropped += 1
            return
        rows.append((what, begin_ns, end_ns, bucket, nbytes, lane, group))

    def happened(self, what: str, group: tuple[int, ...] = ()) -> None:
        """Append an event of model averaging without duration, if the stream is on."""
        if self.on:
            now = time.monotonic_ns()
            self.record(what, now, now, lane=AVERAGES, group=group)

    def timed(
        self, what: str, *, bucket: int = -1, lane: str = "compute"
    ) -> contextlib.AbstractContextManager[None]:
        """Record the duration of the block, also if it raises.

        >>> own = Stream()
        >>> own.start(worker=0)
        >>> with own.timed("forward"):
        ...     _ = sum(range(10))
        >>> [event.what for event in own.stop()]
        ['forward']
        """
        # A training loop calls this hundreds of times per step, mostly with the stream off.
        return self._timed(what, bucket, lane) if self.on else _UNTIMED

    @contextlib.contextmanager
    def _timed(self, what: str, bucket: int, lane: str) -> Iterator[None]:
        begin = time.monotonic_ns()
        try:
            yield
        finally:
            self.record(what, begin, time.monotonic_ns(), bucket=bucket, lane=lane)

    def take(self) -> list[Event]:
        """Return and clear the recorded events; recording continues if the stream is on.

        Warns with ``RuntimeWarning`` if events were dropped.
        """
        rows, self._rows = self._rows, []
        lost = self.dropped - self._warned
        if lost:
            warnings.warn(
                f"worker {self._worker}: {lost} events were dropped, because the stream keeps "
                f"{self._limit}; take() more often, or trace fewer iterations",
                RuntimeWarning,
                stacklevel=2,
            )
            self._warned = self.dropped
        return [
            Event(self._worker, bucket, what, begin_ns, end_ns, nbytes, lane, group)
            for what, begin_ns, end_ns, bucket, nbytes, lane, group in rows
        ]

    def stop(self) -> list[Event]:
        """Stop recording and return the events since ``start`` or the last ``take``."""
        self.on = False
        return self.take()


stream = Stream()
"""The process's stream."""
