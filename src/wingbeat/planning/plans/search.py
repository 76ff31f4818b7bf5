"""Which bucket size to try next: by Bayesian optimisation, at random, or along a grid.

All three look at the logarithm of the size. What a size costs is a latency for each bucket, which
doubles as sizes halve, and a wait for the bucket to fill, which doubles as they double: from 1 to
2 MB as much may change as from 50 to 100. Evenly spaced megabytes would leave the small sizes out.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from wingbeat.planning.plans.sample import Sample, between
from wingbeat.types import Tuning

SEED = 25
"""Where random search starts, so that a run can be repeated."""

NEAR = 0.02
"""How near to an end of the range, as a share, a size is taken for that end."""


def suggest(tuning: Tuning, samples: Sequence[Sample]) -> int:
    """Return the bucket size in bytes to try next, within the tuning's range.

    The same samples always give the same answer.

    Args:
        tuning: the search and its range.
        samples: all trials so far in order, one or more; the first is where tuning started.
    """
    if tuning.low_bytes >= tuning.high_bytes:
        return tuning.low_bytes
    if tuning.search == "random":
        size = _random(tuning, len(samples))
    elif tuning.search == "grid":
        size = _grid(tuning, len(samples), samples[0].nbytes)
    else:
        from wingbeat.planning.plans import (
            bayes,  # scipy and scikit-learn, which only this search needs
        )

        size = bayes.suggest(tuning, samples)
    return _to_an_end(tuning, size)


def suggest_setting(tuning: Tuning, samples: Sequence[Sample]) -> tuple[int, str]:
    """Return the bucket size in bytes and the topology to try next.

    With one topology, or none, only sizes are looked for. Bayesian optimisation looks for both
    together; by the other searches topologies take turns.

    Args:
        tuning: the search, its range and topologies.
        samples: all trials so far in order, one or more.
    """
    several = tuning.topologies
    if len(several) < 2:
        return suggest(tuning, samples), samples[0].topology
    if tuning.search != "bo" or tuning.low_bytes >= tuning.high_bytes:
        return suggest(tuning, samples), several[len(samples) % len(several)]
    from wingbeat.planning.plans import bayes

    size, topology = bayes.suggest_among(tuning, samples)
    return _to_an_end(tuning, size), topology


def _to_an_end(tuning: Tuning, size: int) -> int:
    # At the upper end a bucket may hold the whole model, which one that is hardly smaller does not;
    # and what is drawn from a range is never just its end.
    near = (end for end in (tuning.high_bytes, tuning.low_bytes) if abs(size / end - 1) < NEAR)
    return next(near, size)


def _random(tuning: Tuning, count: int) -> int:
    draws = random.Random(SEED)
    return between(tuning, [draws.random() for _ in range(count)][-1])


def _grid(tuning: Tuning, count: int, start: int) -> int:
    """Go up the grid; the start, which has been tried, stands in for the point nearest to it."""
    last = max(tuning.trials - 1, 1)
    points = [between(tuning, i / last) for i in range(last + 1)]
    points.remove(min(points, key=lambda size: abs(math.log(size / start))))
    return points[(count - 1) % len(points)]
