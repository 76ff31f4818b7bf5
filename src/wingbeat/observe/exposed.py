"""Where the time of a worker's iterations goes, by its recorded events.

Communication that overlaps with computation costs nothing. The rest is *exposed*: the main thread
was blocked on a collective, which the engine records as ``wait``. `breakdown` has all parts of an
iteration, as the bars of DeAR's Fig. 8; a wait counts for the collective that ran at that moment.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields

from wingbeat.errors import UsageError
from wingbeat.observe.events import Event

Interval = tuple[int, int]
"""Begin and end in nanoseconds of the monotonic clock, half-open."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union as disjoint intervals in order, without empty ones.

    >>> union([(5, 9), (0, 3), (2, 4), (7, 7)])
    [(0, 4), (5, 9)]
    """
    out: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if out and begin <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((begin, end))
    return out


def clip(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """Return the parts of the intervals inside the window.

    >>> clip([(0, 4), (5, 9)], (3, 6))
    [(3, 4), (5, 6)]
    """
    begin, end = window
    cut = [(max(b, begin), min(e, end)) for b, e in intervals]
    return [(b, e) for b, e in cut if e > b]


def without(intervals: Iterable[Interval], holes: Iterable[Interval]) -> list[Interval]:
    """Return ``intervals`` minus ``holes``.

    >>> without([(0, 10)], [(2, 3), (8, 12)])
    [(0, 2), (3, 8)]
    """
    out = []
    cut = union(holes)
    for begin, end in union(intervals):
        for low, high in cut:
            if high <= begin or low >= end:
                continue
            if low > begin:
                out.append((begin, low))
            begin = high
        if begin < end:
            out.append((begin, end))
    return out


def exposed_ns(events: Iterable[Event]) -> int:
    """Return the nanoseconds in which one worker was blocked on communication.

    Overlapping waits count once. Raises ``UsageError`` for events of several workers, because their
    waits overlap and the sum has no meaning.

    >>> waits = [Event(0, 1, "wait", 0, 4, 0, "compute"), Event(0, 2, "wait", 2, 6, 0, "compute")]
    >>> exposed_ns(waits)
    6
    """
    return sum(end - begin for begin, end in spans(_of_one_worker(events), "wait"))


def iterations(events: Iterable[Event]) -> list[Interval]:
    """Return one worker's iterations. Each ends with a ``step`` and begins where the last ended.

    The first begins with the first event. Without any ``step``, all events are one iteration.
    Events after the last ``step`` belong to an unfinished iteration and are left out.
    """
    listed = _of_one_worker(events)
    if not listed:
        return []
    start = min(event.begin_ns for event in listed)
    ends = sorted({event.end_ns for event in listed if event.what == "step"})
    if not ends:
        ends = [max(event.end_ns for event in listed)]
    return list(zip([start, *ends[:-1]], ends, strict=True))


def exposed_per_iteration(events: Iterable[Event]) -> list[int]:
    """Return the exposed nanoseconds of each of one worker's ``iterations``."""
    listed = _of_one_worker(events)
    waits = spans(listed, "wait")
    return [sum(end - begin for begin, end in clip(waits, window)) for window in iterations(listed)]


def spans(events: Iterable[Event], what: str) -> list[Interval]:
    """Return when an event of that name was under way."""
    return union((event.begin_ns, event.end_ns) for event in events if event.what == what)


def _of_one_worker(events: Iterable[Event]) -> Sequence[Event]:
    listed = list(events)
    workers = sorted({event.worker for event in listed})
    if len(workers) > 1:
        raise UsageError(f"events of several workers {workers}; allowed: those of one at a time")
    return listed


@dataclass(frozen=True, slots=True)
class Parts:
    """One iteration in seconds. The parts add up to its length.

    Attributes:
        forward_s: forward, without the waits and updates inside it.
        backward_s: backward, without the waits, updates and encoding inside it.
        reduce_scatter_s: waits during a reduce-scatter of this worker.
        all_gather_s: the other waits, if all-gathers are used.
        all_reduce_s: the other waits, if all-reduces or model averaging are used.
        update_s: the optimizer.
        other_s: the rest, such as ``zero_grad`` and Python between the parts.
        encode_s: encoding that delays backward (t_s; OMGS-SGD, section II-D).
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    reduce_scatter_s: float = 0.0
    all_gather_s: float = 0.0
    all_reduce_s: float = 0.0
    update_s: float = 0.0
    other_s: float = 0.0
    encode_s: float = 0.0

    @property
    def total_s(self) -> float:
        """The length of the iteration in seconds."""
        return math.fsum(asdict(self).values())

    @property
    def exposed_s(self) -> float:
        """All waits in seconds."""
        return self.reduce_scatter_s + self.all_gather_s + self.all_reduce_s


_FIELDS = fields(Parts)


def breakdown(events: Iterable[Event], *, skip: int = 1) -> Parts:
    """Break the iteration of median length down, with each part averaged over the workers.

    Args:
        events: events of all workers, in any order; iterations end with ``step``.
        skip: number of first iterations to leave out. The first one has no reliable begin, because
            collectives that began before recording count as its events.

    Raises:
        UsageError: no iteration is left.
    """
    by_worker: dict[int, list[Event]] = {}
    for event in events:
        by_worker.setdefault(event.worker, []).append(event)
    split = [per_iteration(own)[skip:] for own in by_worker.values()]
    averaged = [
        Parts(**{f.name: math.fsum(getattr(p, f.name) for p in each) / len(each) for f in _FIELDS})
        for each in zip(*split, strict=False)
    ]
    if not averaged:
        raise UsageError(f"no iteration to break down after the first {skip}; record more")
    averaged.sort(key=lambda parts: parts.total_s)
    return averaged[(len(averaged) - 1) // 2]


def per_iteration(events: Iterable[Event]) -> list[Parts]:
    """Break each of one worker's ``iterations`` down.

    >>> own = [
    ...     Event(0, -1, "forward", 0, 5, 0, "compute"),
    ...     Event(0, 0, "wait", 1, 3, 0, "compute"),
    ...     Event(0, 0, "reduce_scatter", 0, 2, 0, "eth0"),
    ...     Event(0, 0, "all_gather", 2, 4, 0, "eth0"),
    ...     Event(0, -1, "step", 5, 6, 0, "compute"),
    ... ]
    >>> [parts] = per_iteration(own)
    >>> [round(1e9 * s) for s in (parts.forward_s, parts.reduce_scatter_s, parts.all_gather_s)]
    [3, 1, 1]

    Raises:
        UsageError: the events are of several workers.
    """
    listed = list(events)
    return [_parts(listed, window) for window in iterations(listed)]


def _parts(events: Sequence[Event], window: Interval) -> Parts:
    """Count each instant once: wait before update, encoding, forward, backward."""

    def during(what: str) -> list[Interval]:
        return clip(spans(events, what), window)

    waits = during("wait")
    updates = without(during("update"), waits)
    encodes = without(during("encode"), [*waits, *updates])
    busy = [*waits, *updates, *encodes]
    forward = without(during("forward"), busy)
    backward = without(during("backward"), [*busy, *forward])
    named = {event.what for event in events}
    rest = without(waits, during("reduce_scatter"))
    if not named & {"all_reduce", "all_gather", "average"}:
        rest = []  # the remaining wait is the worker's wake-up latency
    whole = bool(named & {"all_reduce", "average"})
    return Parts(
        forward_s=_seconds(forward),
        backward_s=_seconds(backward),
        reduce_scatter_s=_seconds(waits) - _seconds(rest),
        all_gather_s=0.0 if whole else _seconds(rest),
        all_reduce_s=_seconds(rest) if whole else 0.0,
        update_s=_seconds(updates),
        other_s=_seconds(without([window], [*busy, *forward, *backward])),
        encode_s=_seconds(encodes),
    )


def _seconds(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals) / 1e9
