"""Curves of iteration times by threshold, and workers that tune on them in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from wingbeat.planning.thresholds import (
    Cuts,
    ThresholdResult,
    cuts_from_thresholds,
    threshold_trial,
)

Curve = Callable[[float], float]
"""Seconds of an iteration by the share of buckets on the urgent side."""

CURVES: dict[str, Curve] = {
    "vee": lambda x: 1 + (0.3 * (0.7 - x) if x < 0.7 else 0.5 * (x - 0.7)),
    "vee far left": lambda x: 1 + (0.8 * (0.15 - x) if x < 0.15 else 0.2 * (x - 0.15)),
    "parabola": lambda x: 1 + 0.6 * (x - 0.4) ** 2,
    "a large layer at the end": lambda x: 1.2 - 0.2 * x if x < 0.83 else 1.35,
    "a huge layer": lambda x: 1.2 - 0.2 * x if x < 0.62 else 2.0,
    "a step down": lambda x: 1.3 if x < 0.3 else 1.0 + 0.1 * (x - 0.3),
    "flat": lambda _: 1.0,
    "falls": lambda x: 1.5 - 0.4 * x,
    "rises": lambda x: 1 + 0.4 * x,
    "few at the front": lambda x: 1.4 - 0.3 * (x >= 0.01) + 0.05 * (x > 0.08) + 0.1 * (x > 0.5),
    "narrow": lambda x: 1 + min(0.3, 2 * abs(x - 0.55)),
    "a bump": lambda x: 1 + 0.3 * abs(x - 0.6) + (0.05 if 0.3 < x < 0.4 else 0),
}


def seconds_of(curve: Curve, cuts: Cuts, layers: int) -> float:
    """Return the time with at most one cut."""
    return curve((cuts[0] if cuts else 0) / (layers - 1))


def play(
    seconds: Callable[[Cuts, int], Sequence[float]],
    layers: int,
    start: Sequence[float] = (0.5,),
    steps: int = 5,
    size: int = 1,
) -> tuple[ThresholdResult, list[Cuts]]:
    """Let workers tune; ``seconds`` of cuts and an iteration are those of each worker.

    As in training: what is measured in one iteration is said in the next and heard after that.

    Returns:
        What rank 0 has found, and the cuts of each iteration, which were the same on all workers.
    """
    trials = [threshold_trial(layers, start, steps, rank, range(size)) for rank in range(size)]
    used = [cuts_from_thresholds(start, layers)] * size
    measured = [0.0] * size
    history: list[Cuts] = []
    said: list[list[float]] | None = None
    for iteration in range(100_000):
        if said is not None:
            for rank, trial in enumerate(trials):
                changed = trial.process_rows(said)
                if changed is not None:
                    used[rank], measured[rank] = changed, 0.0
        assert len(set(used)) == 1
        assert len({trial.done for trial in trials}) == 1
        if trials[0].done:
            assert trials[0].result is not None
            assert all(trial.result is None for trial in trials[1:])
            assert used[0] == trials[0].result.chosen
            return trials[0].result, history
        said = [trial.report(s) for trial, s in zip(trials, measured, strict=True)]
        history.append(used[0])
        measured = list(seconds(history[-1], iteration))
    raise AssertionError("tuning did not end")


def noisy(curve: Curve, layers: int, noise: float, seed: int, size: int = 1) -> Callable[..., list]:
    """Return times that scatter by a share of ``noise``, the same for all workers and then some."""
    chance = random.Random(seed)

    def seconds(cuts: Cuts, _iteration: int) -> list[float]:
        common = seconds_of(curve, cuts, layers) * max(0.1, chance.gauss(1, noise))
        return [common * chance.uniform(1, 1.001) for _ in range(size)]

    return seconds
