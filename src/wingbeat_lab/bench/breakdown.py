"""Breaks an iteration's time down by recorded events: the bars of DeAR's Fig. 8.

Communication that overlaps with computation is not shown. Waiting is attributed to the collective
that was running at that moment.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields

from wingbeat.errors import UsageError
from wingbeat.observe.events import Event
from wingbeat.observe.exposed import Interval, clip, iterations, spans, without


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


def breakdown(events: Iterable[Event]) -> Parts:
    """Break the iteration of median length down, with each part averaged over the workers.

    ``events`` are those of all workers, in any order; iterations end with ``step``. The first one
    is left out: it has no reliable begin, because collectives that began before recording count as
    its events. Raises UsageError if none is left.
    """
    by_worker: dict[int, list[Event]] = {}
    for event in events:
        by_worker.setdefault(event.worker, []).append(event)
    split = [per_iteration(own)[1:] for own in by_worker.values()]
    averaged = [
        Parts(**{f.name: math.fsum(getattr(p, f.name) for p in each) / len(each) for f in _FIELDS})
        for each in zip(*split, strict=False)
    ]
    if not averaged:
        raise UsageError("no iteration to break down after the first one; record more")
    averaged.sort(key=lambda parts: parts.total_s)
    return averaged[(len(averaged) - 1) // 2]


def per_iteration(events: Iterable[Event]) -> list[Parts]:
    """Break each of one worker's ``iterations`` down; raises UsageError for several workers.

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
