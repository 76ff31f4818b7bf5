"""Deliberately slow workers: which one sleeps before which iteration, and for how long. Pure.

As in Ripples (Luo et al., 2019), section 7.4, a slow worker sleeps between two iterations for a
multiple of a normal iteration's time, in addition to its work.
"""

from __future__ import annotations

import math
import random
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from wingbeat.errors import UsageError

LARGEST = 1000.0
"""Maximum sleep, in normal iterations."""

ALLOWED = (
    "RANK=+2x (that worker sleeps twice a normal iteration before each of its own), RANK=+2x@20-60"
    " (before the timed iterations 20 to 60), random:+2x (a random worker, another each time)"
)

_SPEC = re.compile(
    r"(?:(?P<rank>\d{1,6})=|random:)\+(?P<factor>[^x@]*)x(?:@(?P<first>\d{1,9})-(?P<last>\d{1,9}))?"
)
_LINK = re.compile(r"h\d+(\.eth\d+)?@\S+")


@dataclass(frozen=True, slots=True)
class Slow:
    """One kind of slowness.

    Attributes:
        rank: the worker; None for one that is drawn for each iteration.
        factor: the sleep before an iteration, in normal iterations.
        span: first and last timed iterations with a sleep, counted from 1 over all rounds of a
            row; None for all iterations, including those before the timed ones.
    """

    text: str
    rank: int | None
    factor: float
    span: tuple[int, int] | None

    def holds(self, iteration: int) -> bool:
        """Whether a worker is slow in this iteration; untimed iterations are below 1."""
        return self.span is None or self.span[0] <= iteration <= self.span[1]

    def meets(self, other: Slow) -> bool:
        """Whether both may apply to one worker in one iteration."""
        if self.rank is not None and other.rank is not None and self.rank != other.rank:
            return False
        if self.span is None or other.span is None:
            return True
        return self.span[0] <= other.span[1] and other.span[0] <= self.span[1]


def parse(texts: Sequence[str], *, workers: int, iterations: int) -> tuple[Slow, ...]:
    """Parse the values of ``--slow``.

    >>> parse(["3=+2x@20-60"], workers=4, iterations=60)
    (Slow(text='3=+2x@20-60', rank=3, factor=2.0, span=(20, 60)),)

    UsageError for an invalid or impossible value, or two that may apply to one worker at once.
    """
    found: list[Slow] = []
    for text in texts:
        slow = _one(text, workers, iterations)
        for other in found:
            if slow.meets(other):
                raise UsageError(
                    f"--slow {other.text} and --slow {text} may both hold for one worker in one "
                    "iteration; allowed: one at a time"
                )
        found.append(slow)
    return tuple(found)


def _one(text: str, workers: int, iterations: int) -> Slow:
    if _LINK.fullmatch(text):
        raise UsageError(
            f"--slow {text!r}: a host's link rate is part of the lab: --lab star:4@1gbit,{text}"
        )
    match = _SPEC.fullmatch(text)
    if match is None:
        raise UsageError(f"--slow {text!r}; allowed: {ALLOWED}")
    rank = None if match["rank"] is None else int(match["rank"])
    if rank is not None and rank >= workers:
        raise UsageError(f"--slow {text!r}: no rank {rank}; allowed: 0 to {workers - 1}, or random")
    span = None if match["first"] is None else (int(match["first"]), int(match["last"]))
    if span is not None and not 1 <= span[0] <= span[1] <= iterations:
        raise UsageError(
            f"--slow {text!r}: iterations {span[0]} to {span[1]}; allowed: a first and a last one "
            f"of the {iterations} timed iterations of a row, counted from 1"
        )
    return Slow(text, rank, _factor(match["factor"], text), span)


def _factor(text: str, spec: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= LARGEST:
        raise UsageError(
            f"--slow {spec!r}: {text!r} times as long; allowed: numbers above 0 up to {LARGEST:g}"
        )
    return value


def factor(slows: Iterable[Slow], *, rank: int, iteration: int, workers: int, seed: int) -> float:
    """How many normal iterations this worker sleeps before this iteration; mostly 0.

    Timed iterations start at 1. The ``seed`` determines the drawn workers, in every row.
    """
    for slow in slows:
        if slow.holds(iteration):
            chosen = _drawn(iteration, workers, seed) if slow.rank is None else slow.rank
            if chosen == rank:
                return slow.factor
    return 0.0


def longest(slows: Sequence[Slow], *, iterations: int) -> float:
    """How many normal iterations the slowest worker sleeps, mean over the timed iterations."""
    if not slows:
        return 0.0
    return statistics.fmean(
        max((slow.factor for slow in slows if slow.holds(i)), default=0.0)
        for i in range(1, iterations + 1)
    )


def _drawn(iteration: int, workers: int, seed: int) -> int:
    # One generator per draw: workers agree even if they have made different iterations.
    return random.Random(f"{seed}:{iteration}").randrange(workers)
