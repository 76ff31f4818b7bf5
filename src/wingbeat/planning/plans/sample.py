"""What a trial of a bucket size has shown, and the scale on which sizes lie."""

from __future__ import annotations

import math
from dataclasses import dataclass

from wingbeat.types import Tuning


@dataclass(frozen=True, slots=True)
class Sample:
    """What one trial has shown.

    ``nbytes`` is the bucket size in bytes; ``throughput`` is in iterations per second: the mean
    over all workers, the median over the trial's steps. ``topology`` is the one that buckets were
    exchanged along; empty where topologies are not tuned.
    """

    nbytes: int
    throughput: float
    topology: str = ""


def between(tuning: Tuning, share: float) -> int:
    """Return the size that lies at ``share`` (0 to 1) of the range, on a logarithmic scale.

    >>> [between(Tuning(search="grid", low_bytes=1, high_bytes=100), s) for s in (0, 0.5, 1)]
    [1, 10, 100]
    """
    low, high = tuning.low_bytes, tuning.high_bytes
    return min(max(round(low * math.pow(high / low, share)), low), high)
