"""What training measures of a model's layers, to bundle them into colayers by it (Canary, 4.3.2).

How long backward takes for each gradient, and how wide gradients are distributed: as the logarithm
of the value below which nearly all of them are, on a sample. Workers tell each other both when they
settle (`wingbeat.exchanges.rebundling`), and one of them bundles by the medians.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from wingbeat import plans
from wingbeat.control.passes import Passes
from wingbeat.engine.gradients.bucket import Bucket
from wingbeat.engine.gradients.bucketing import Bucketing
from wingbeat.errors import PeerError
from wingbeat.types import Plan, PlannedBucket

SAMPLE = 4096
"""Elements of a gradient that are looked at."""

QUANTILE = 0.999
"""Part of the absolute values that are below the one that counts."""

_LONGEST_S = 1e6

Told = tuple[list[float] | None, list[float | None]]
"""When gradients are ready, by tensor, in seconds from the first; and their widths."""


class Bundling:
    """One worker's measurements, and colayers by those of all.

    Args:
        bucketing: the plan in force; its rule says how many colayers there are to be.
        rebucket: has the engine change to the next plan.

    Attributes:
        passes: times backward, gradient by gradient.
        count: gradients.
    """

    def __init__(self, bucketing: Bucketing, rebucket: Callable[[], object]) -> None:
        self._bucketing, self._rebucket = bucketing, rebucket
        self.count = len(bucketing.slots)
        self.passes = Passes(self.count, bucketing.device, goes_on=False)
        self._widths: list[list[float]] = [[] for _ in range(self.count)]

    @torch.no_grad()
    def look(self, bucket: Bucket) -> None:
        """See how wide the gradients of a bucket are distributed, which are complete."""
        if self.passes.watching:
            for slot in bucket.slots:
                if slot.used and (width := width_of(slot.view)) is not None:
                    self._widths[slot.index].append(width)

    def own(self) -> Told:
        """Return what this worker has measured, medians over its iterations."""
        times, order = self.passes.times, self._bucketing.ready_order
        ready = dict(zip(order, times.medians(order), strict=True)) if times.totals() else None
        return (
            None if ready is None else [ready[slot.index] for slot in self._bucketing.slots],
            [statistics.median(each) if each else None for each in self._widths],
        )

    def choose(self, told: Sequence[Any]) -> tuple[tuple[int, ...], ...] | None:
        """Return the tensors of each colayer, by the medians of all; None if nobody has measured.

        Args:
            told: what `own` has returned on each, as it came from the others.

        Raises:
            PeerError: it is none of that.
        """
        rows = [self._checked(each) for each in told]
        ready = [times for times, _ in rows if times is not None]
        if not ready:
            return None
        widths = [
            [width for width in column if width is not None]
            for column in zip(*(widths for _, widths in rows), strict=True)
        ]
        measured = plans.Measured(
            tuple(statistics.median(column) for column in zip(*ready, strict=True)),
            tuple(statistics.median(column) if column else None for column in widths),
        )
        b = self._bucketing
        plan = plans.make(b.fusion, b.specs, b.ready_order, measured)
        return tuple(bucket.tensors for bucket in plan.buckets)

    def follow(self, buckets: Sequence[Sequence[int]]) -> None:
        """Have these colayers from the next plan on, and measure no more."""
        self.passes.watching = False
        self._bucketing.follow(Plan(tuple(PlannedBucket(tuple(each)) for each in buckets)))

    def replan(self) -> None:
        """Make the buckets of the next plan."""
        self._rebucket()

    def stop(self) -> None:
        """Measure no more."""
        self.passes.watching = False

    def _checked(self, told: Any) -> Told:
        count = self.count
        try:
            ready, widths = told
            times = [0.0] * count if ready is None else ready
            fine = len(times) == len(widths) == count and all(
                type(value) in (int, float) and math.isfinite(value) and abs(value) <= _LONGEST_S
                for value in (*times, *(width for width in widths if width is not None))
            )
        except (TypeError, ValueError):
            fine = False
        if not fine:
            raise PeerError(
                f"{told!r:.60} is nothing measured of {count} gradients; all workers have to run "
                "the same model and wingbeat"
            )
        return ready, widths


def width_of(gradient: torch.Tensor) -> float | None:
    """Return the natural logarithm of a high quantile of the absolute values, on a sample.

    Args:
        gradient: any shape, floating point.

    Returns:
        None if there is no finite value but 0.

    >>> width_of(torch.tensor([0.5, -1.0, 0.25, 0.0]))
    0.0
    >>> width_of(torch.zeros(3))
    """
    flat = gradient.detach().reshape(-1)
    sample = flat[:: max(1, flat.numel() // SAMPLE)].abs().float()
    place = max(0, math.ceil(QUANTILE * sample.numel()) - 1)
    value = float(sample.sort().values[place]) if sample.numel() else 0.0
    return math.log(value) if 0 < value < math.inf else None
