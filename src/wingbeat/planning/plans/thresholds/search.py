"""Which cuts to try next, and which to keep. Pure: the same times always give the same answers.

One cut is looked for after the other: first the one that two classes have, then one more beside it
for each further class. Each time a few places are spread over the order of forward, and more are
put beside the best of them, where the time may jump from one layer to the next. In the
end the best few are measured again in turn: among noisy times the least is too small, and a machine
that has slowed down meanwhile slows all of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from wingbeat.planning.plans.thresholds.cuts import Cuts
from wingbeat.planning.plans.thresholds.line import BACK, FRONT, Line, Times

BESIDE = (5, 3, 3)
"""Places tried beside the best of those that are spread, for the first cut and those after it."""

CLEAR, DOUBTS = 0.008, 16
"""Standard error, as a share, above which the best two are measured again before it is looked
beside the better one; and how often, for each cut that is looked for."""

FINALISTS = 3
"""How many of the best are measured again."""

SURE = 0.005
"""Standard error of a finalist's time, as a share, at which no more measurements are wanted."""

AGAIN = 5
"""The most times that finalists are measured again."""


@dataclass(frozen=True, slots=True)
class Found:
    """The end of a search.

    Attributes:
        cuts: the best ones.
        lines: one for each cut that was looked for, in order.
        times: seconds of all iterations with each of the cuts tried, in the order first tried.
    """

    cuts: Cuts
    lines: tuple[Line, ...]
    times: dict[Cuts, list[float]]


Search = Generator[Cuts, Sequence[float], Found]
"""Yields the cuts to try, is sent the seconds of iterations with them, and returns what is best."""


def search(layers: int, classes: int) -> Search:
    """Look for the best cuts of ``layers`` layers into ``classes`` classes."""
    times: dict[Cuts, list[float]] = {}
    lines: list[Line] = []
    base: Cuts = ()
    for beside in BESIDE[: classes - 1]:
        line = Line(base, layers)
        lines.append(line)
        for place in line.spread():
            if line.at(place) not in times:
                times[line.at(place)] = list((yield line.at(place)))
        doubts = DOUBTS
        while beside:
            vague = [cuts for cuts in _ranked(line, times)[:2] if error(times, cuts) > CLEAR]
            if vague and doubts:
                doubts -= 1
                times[vague[0]] += yield vague[0]
                continue
            beside -= 1
            between = line.between(times)
            if between is None:
                break
            times[line.at(between)] = list((yield line.at(between)))
        base = _ranked(line, times)[0]
    finalists = _ranked(lines[-1], times)[:FINALISTS]
    for _ in range(AGAIN if len(finalists) > 1 else 0):
        if max(error(times, cuts) for cuts in finalists) <= SURE:
            break
        for cuts in finalists:
            times[cuts] += yield cuts
    best = next(cuts for cuts in _ranked(lines[-1], times) if cuts in finalists)
    return Found(best, tuple(lines), times)


def error(times: Times, cuts: Cuts) -> float:
    """Return the standard error of the median of the times with ``cuts``, as a share of it.

    How much single iterations scatter is taken from all trials, by medians, so that an evaluation
    between two iterations does not count.
    """
    medians = {tried: statistics.median(seconds) for tried, seconds in times.items()}
    away = [abs(s / medians[tried] - 1) for tried, seconds in times.items() for s in seconds]
    return 1.25 * 1.48 * statistics.median(away) / math.sqrt(len(times[cuts]))


def _ranked(line: Line, times: Times) -> list[Cuts]:
    """Return the cuts of a line that were tried, the fastest first."""
    return list(dict.fromkeys(line.at(place) for place in line.ranked(times)))


def most_trials(layers: int, classes: int) -> int:
    """Return the most trials that a search can take: times scatter as much as they may."""
    cuts = sum(min(count, layers) + DOUBTS for count in _counts(classes))
    return cuts + FINALISTS * AGAIN


def usual_trials(classes: int) -> int:
    """Return about how many trials a search takes where times scatter by 1%."""
    return sum(_counts(classes)) + FINALISTS


def _counts(classes: int) -> list[int]:
    """Return how many places are tried, at most, for each cut."""
    first, *others = BESIDE[: classes - 1]
    return [1 + FRONT + BACK + first, *(FRONT + 1 + beside for beside in others)]
