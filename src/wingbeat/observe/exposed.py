"""Computes from a worker's events how long it was blocked on communication.

Communication that overlaps with computation costs nothing. The rest is *exposed*: the main thread
was blocked on a collective, which the engine records as ``wait``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
