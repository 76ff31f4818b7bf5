"""Training time until a target loss."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from wingbeat_lab.bench.config import LOSSES

Curve = Sequence[tuple[float, float]]
"""Seconds and loss of each iteration, in order, warm-up included; of one worker."""


@dataclass(frozen=True, slots=True)
class TimeToLoss:
    """When a row's loss fell below a target.

    Attributes:
        seconds: median over the rounds; None unless every round reached it.
        by_round: seconds of each round, None where it was not reached.
    """

    target: float
    seconds: float | None
    by_round: list[float | None]


def time_to_loss(target: float, rounds: Sequence[Sequence[Curve]]) -> TimeToLoss:
    """Combine the rounds of a row; each holds one curve for each worker."""
    by_round = [seconds_to(target, curves) for curves in rounds]
    reached = [seconds for seconds in by_round if seconds is not None]
    median = statistics.median(reached) if len(reached) == len(by_round) else None
    return TimeToLoss(target, median, by_round)


def seconds_to(target: float, curves: Sequence[Curve]) -> float | None:
    """Seconds until the mean loss of the last `LOSSES` iterations is below the target, or None.

    An iteration's loss is the mean over the workers; it ends with its last worker. Workers whose
    numbers of iterations differ are not in lockstep: their steps count in order of time.
    """
    if len({len(curve) for curve in curves}) > 1:
        return _of_steps(target, curves)
    losses: list[float] = []
    spent = [0.0] * len(curves)
    for workers in zip(*curves, strict=True):
        losses.append(statistics.fmean(loss for _, loss in workers))
        spent = [before + s for before, (s, _) in zip(spent, workers, strict=True)]
        if len(losses) >= LOSSES and statistics.fmean(losses[-LOSSES:]) < target:
            return max(spent)
    return None


def _of_steps(target: float, curves: Sequence[Curve]) -> float | None:
    """The same for the last `LOSSES` steps times the number of workers, of any worker."""
    steps: list[tuple[float, float]] = []
    for curve in curves:
        ends = itertools.accumulate(seconds for seconds, _ in curve)
        steps += zip(ends, (loss for _, loss in curve), strict=True)
    steps.sort()
    count = LOSSES * len(curves)
    for last in range(count, len(steps) + 1):
        if statistics.fmean(loss for _, loss in steps[last - count : last]) < target:
            return steps[last - 1][0]
    return None
