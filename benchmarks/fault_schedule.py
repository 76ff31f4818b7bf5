"""Faults that follow from a seed, and what is left of a training run that had them.

Pure functions: the schedule of `goodput.py`, and its accounting.
"""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

KINDS = {
    "kill": "SIGKILL to the process of a replica",
    "stop": "SIGSTOP to the process of a replica, then SIGCONT",
    "cut": "the NIC of a replica has no carrier, then has it again",
    "slow": "the NIC of a replica has a fraction of its rate, then all of it",
    "disk": "the disk of checkpoints is full, then has room again",
    "server": "SIGKILL to a parameter server",
    "generator": "SIGKILL to the process that makes groups (torchft: the lighthouse)",
    "supervisor": "SIGKILL to the process that restarts a replica, and to that replica",
    "rank 0": "SIGKILL to rank 0 and to the store (torchft: the lighthouse) at once",
}
"""Every kind of fault, in the order in which one that does not apply is replaced by the next."""
LASTING = ("stop", "cut", "slow", "disk")
"""Kinds that end after a while."""
FATAL = ("kill", "server", "supervisor", "rank 0")
"""Kinds that end a process of an exact strategy."""

LEAD, TAIL = 0.02, 0.06
"""Shares of the time before the first fault and after the last one begins; it ends in half of the
tail."""
SHORTEST, LONGEST = 0.1, 0.5
"""Of a lasting fault, as a share of the mean time between two faults."""
MOST_S = 15.0
"""Seconds that a lasting fault lasts at most."""
WATCHED_S = 30.0
"""Seconds after a fault, at most, in which pauses of the survivors count as its own."""


class Fault(NamedTuple):
    """One fault.

    Attributes:
        at: seconds after all replicas trained.
        kind: one of `KINDS`.
        victim: number of the replica; of the server, for ``server``.
        lasts: seconds; 0 for kinds that are no state.
        drawn: the kind that was drawn, if that does not apply; otherwise empty.
    """

    at: float
    kind: str
    victim: int
    lasts: float
    drawn: str = ""

    @property
    def end(self) -> float:
        """Seconds after all replicas trained, at which it is over."""
        return self.at + self.lasts

    def __str__(self) -> str:
        lasts = f" for {self.lasts:.1f} s" if self.lasts else ""
        instead = f" (in place of {self.drawn})" if self.drawn else ""
        return f"{self.at:7.1f} s  {self.kind}{lasts}, replica {self.victim}{instead}"


def schedule(
    seed: int, minutes: float, replicas: int, count: int, kinds: Collection[str] = tuple(KINDS)
) -> list[Fault]:
    """Return ``count`` faults, which these arguments determine.

    The time between a lead and a tail has ``count`` equal parts, with one fault at a random moment
    of each. Every kind comes once before any comes again, in a random order. Rank 0 is the victim
    of ``rank 0``.
    """
    drawn, seconds = random.Random(f"{seed}/{replicas}"), 60.0 * minutes
    part = seconds * (1 - LEAD - TAIL) / count
    rows: list[str] = []
    faults = []
    for number in range(count):
        rows = rows or drawn.sample([kind for kind in KINDS if kind in kinds], len(kinds))
        kind, moment = rows.pop(), drawn.random()
        victim, lasts = drawn.randrange(replicas), drawn.uniform(SHORTEST, LONGEST) * part
        at = seconds * LEAD + (number + moment) * part
        victim = 0 if kind == "rank 0" else victim
        lasts = min(_lasts(kind, lasts, part), seconds * (1 - TAIL / 2) - at)
        faults.append(Fault(round(at, 3), kind, victim, round(lasts, 3)))
    return faults


def applied(faults: Sequence[Fault], allowed: Collection[str], part: float) -> list[Fault]:
    """Replace each kind that a strategy does not have by the next one that it has.

    A replacement that lasts lasts the shortest time of a schedule whose parts have ``part``
    seconds.
    """
    order = list(KINDS)
    found = []
    for fault in faults:
        begin = order.index(fault.kind)
        kind = next(k for k in order[begin:] + order[:begin] if k in allowed)
        if kind != fault.kind:
            lasts = round(_lasts(kind, SHORTEST * part, part), 3)
            victim = 0 if kind == "rank 0" else fault.victim
            fault = Fault(fault.at, kind, victim, lasts, fault.kind)
        found.append(fault)
    return found


def _lasts(kind: str, seconds: float, part: float) -> float:
    """Return how long a fault lasts; a disk is full as long as any, to meet a checkpoint."""
    if kind not in LASTING:
        return 0.0
    return min(LONGEST * part if kind == "disk" else seconds, MOST_S)


# -- what replicas record ----------------------------------------------------------------------


class Event(NamedTuple):
    """One line of a replica's record.

    Attributes:
        kind: ``begin`` of a process, ``step``, ``merged`` (the steps since the last of these are
            in the shared model), ``lost`` (they are not, and never will be) or ``end``, by which
            the rest is merged.
        at: seconds of the machine's monotonic clock.
        number: of the step, counted by its model.
    """

    kind: str
    at: float
    number: int = 0


def read(text: str) -> list[Event]:
    """Return the events of a record; a line that a killed process left unfinished is ignored."""
    lines = (line.split() for line in text.split("\n")[:-1])
    return [Event(words[0], float(words[1]), int(words[2])) for words in lines if len(words) >= 3]


def last_life(events: Sequence[Event]) -> Sequence[Event]:
    """Return the events of the last process of a replica; none if there was none."""
    begins = [number for number, event in enumerate(events) if event.kind == "begin"]
    return events[begins[-1] :] if begins else []


def steps(events: Iterable[Event]) -> list[float]:
    """Return the times of steps."""
    return [event.at for event in events if event.kind == "step"]


def merged_steps(events: Iterable[Event], until: float) -> int:
    """Return how many steps before ``until`` a replica has merged into the shared model.

    A step of a process that was killed before the next average is lost.
    """
    total, pending = 0, 0
    for event in events:
        if event.kind == "step":
            pending += event.at <= until
        elif event.kind in ("merged", "end"):
            total, pending = total + pending, 0
        elif event.kind in ("begin", "lost"):
            pending = 0
    return total


def kept_steps(events: Iterable[Event], until: float) -> int:
    """Return how many different steps a replica had made by ``until`` and did not repeat later.

    Steps after a checkpoint from which the run continues are made again, and count once.
    """
    last = {event.number: event.at for event in events if event.kind == "step"}
    return sum(at <= until for at in last.values())


def counted_steps(events: Iterable[Event], until: float, counted: Collection[int]) -> int:
    """Return how many steps before ``until`` have one of the ``counted`` numbers."""
    numbers = {event.number for event in events if event.kind == "step" and event.at <= until}
    return len(numbers.intersection(counted))


def model_steps(records: Iterable[Iterable[Event]], until: float) -> int:
    """Return the number of steps of the model that is ahead at ``until``."""
    made = (e.number for events in records for e in events if e.kind == "step" and e.at <= until)
    return max(made, default=0)


def differing_steps(first: str, second: str) -> list[int]:
    """Return the steps after which weights differ within or between two runs of an exact strategy.

    Each text has lines of a step and a digest; a step that was repeated has several.
    """
    found: dict[int, set[str]] = {}
    for line in (first + second).splitlines():
        step, _, digest = line.partition(" ")
        found.setdefault(int(step), set()).add(digest)
    return sorted(step for step, digests in found.items() if len(digests) > 1)


# -- pauses ------------------------------------------------------------------------------------


class Pause(NamedTuple):
    """How long a replica made no step after a fault: until the first one, and the longest time."""

    first: float
    longest: float


def pause(times: Sequence[float], begin: float, end: float) -> Pause:
    """Return the pauses of a replica whose steps ended at ``times``, from ``begin`` on.

    A pause that began before ``end`` counts as a whole; without a later step it lasts to ``end``.
    """
    first, after = bisect.bisect_right(times, begin), bisect.bisect_right(times, end)
    points = [begin, *times[first : after + 1]]
    if after == len(times):
        points.append(max(end, begin))
    gaps = [late - early for early, late in itertools.pairwise(points)]
    return Pause(gaps[0], max(gaps))


def returned(fault: Fault, begin: float, events: Sequence[Event]) -> float | None:
    """Return the seconds until the victim trained again; None if it did not.

    Args:
        fault: the fault; after one that lasts, they count from its end.
        begin: moment from which times of faults count.
        events: of the victim.
    """
    since = begin + fault.end
    lives = [e.at for e in events if e.kind == "begin" and e.at > since]
    if not fault.lasts and not lives:
        return None
    first = since if fault.lasts else lives[0]
    return next((at - since for at in steps(events) if at > first), None)


def watched(faults: Sequence[Fault], number: int, seconds: float) -> float:
    """Return the end of the time in which pauses count as those of a fault; of ``seconds`` in all.

    Training ends then, and that is no pause.
    """
    later = [fault.at for fault in faults[number + 1 : number + 2]]
    return min([faults[number].at + WATCHED_S, seconds, *later])


def survivors(
    faults: Sequence[Fault], number: int, begin: float, records: Sequence[Sequence[Event]]
) -> list[int]:
    """Return the replicas that trained when a fault occurred, without its victim."""
    fault = faults[number]
    absent = {fault.victim}
    for earlier in faults[:number]:
        back = returned(earlier, begin, records[earlier.victim])
        if back is None or earlier.end + back > fault.at:
            absent.add(earlier.victim)
    return [replica for replica in range(len(records)) if replica not in absent]


# -- the bound of a strategy that restarts all -------------------------------------------------


def bound(
    faults: Sequence[Fault],
    *,
    seconds: float,
    step_s: float,
    every: int,
    restart_s: float,
    slow_step_s: float,
) -> float:
    """Return the share of steps that restarts from checkpoints leave at most.

    Every step needs all replicas. A fatal fault loses the steps since the last checkpoint, and
    ``restart_s`` seconds. All wait while a replica is stopped or cut, and are as slow as a slow
    one. No checkpoint is saved on a full disk.

    Args:
        faults: in the order of their times.
        seconds: length of the run.
        step_s: of an undisturbed step.
        every: steps between two checkpoints.
        restart_s: from a kill to the next step, when nothing else happens.
        slow_step_s: of a step beside a slow NIC.
    """

    def during(kinds: Sequence[str], now: float) -> list[Fault]:
        return [f for f in faults if f.kind in kinds and f.at <= now < f.end]

    fatal = [fault.at for fault in faults if fault.kind in FATAL]
    now, made, saved = 0.0, 0, 0
    while True:
        now = max([now, *(fault.end for fault in during(("stop", "cut"), now))])
        end = now + (slow_step_s if during(("slow",), now) else step_s)
        if fatal and fatal[0] <= min(end, seconds):
            made, now = saved, max(now, fatal.pop(0) + restart_s)
            continue
        if end > seconds:
            return made / (seconds / step_s)
        made, now = made + 1, end
        if made % every == 0 and not during(("disk",), now):
            saved = made
