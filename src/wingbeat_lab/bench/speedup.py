"""The speed-up of P workers over one, and its upper bound: S and S_max.

DeAR (Zhang et al., 2023), Eq. 6 and Table II, with all four times measured in the same run:

    bound = max(t_ff, t_ag) + max(t_bp, t_rs)
    S_max = P (t_ff + t_bp) / bound         S = P (t_ff + t_bp) / iteration

so that S / S_max = bound / iteration. t_ff and t_bp are those of the model alone; t_rs and t_ag
are the times to exchange all its gradients, submitted at once, with nothing else running. Unlike
``bound.floor`` this bound uses the measured throughput of the links, and ignores layers.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

HALVES = ("reduce_scatter", "all_gather")
"""The measured collectives: the two halves of an all-reduce."""

WAYS = ("whole", "buckets")
"""How all gradients are submitted: as one buffer, or as a sequence of buckets."""

Span = tuple[float, float]
"""When one worker began and when it had the result, in seconds of the machine's monotonic clock."""


@dataclass(frozen=True, slots=True)
class Timings:
    """The measurements of one worker in one round.

    Attributes:
        forward_s: seconds of each forward of the model alone.
        backward_s: seconds of each backward of the model alone.
        spans: by half and way, as in ``reduce_scatter/whole``, begin and end of each repetition.
        nbytes: bytes of all the gradients.
    """

    forward_s: list[float]
    backward_s: list[float]
    spans: dict[str, list[Span]]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Measured:
    """The measured times of a bench and the derived figures.

    Attributes:
        workers: P.
        nbytes: bytes of all gradients, the input of each half of the exchange.
        bucket_bytes: size of a bucket of the way ``buckets``.
        t_ff_s: forward, the slowest worker's median.
        t_bp_s: backward, the slowest worker's median.
        t_rs_s: reduce-scatter until the last worker has its result; median, the faster way.
        t_ag_s: all-gather, likewise.
        bound_s: max(t_ff, t_ag) + max(t_bp, t_rs).
        s_max: P (t_ff + t_bp) / bound_s.
        faster: the faster way, by half.
        samples_s: the samples of the medians: ``forward`` and ``backward`` (all workers'), and
            each half and way.
    """

    workers: int
    nbytes: int
    bucket_bytes: int
    t_ff_s: float
    t_bp_s: float
    t_rs_s: float
    t_ag_s: float
    bound_s: float
    s_max: float
    faster: dict[str, str]
    samples_s: dict[str, list[float]]

    def speedup(self, iteration_s: float) -> float:
        """S: the speed-up over one worker with the same batch size per worker."""
        return self.workers * (self.t_ff_s + self.t_bp_s) / iteration_s


def measured(rounds: Sequence[Sequence[Timings]], *, bucket_bytes: int) -> Measured | None:
    """Combine the rounds; each holds one ``Timings`` for each worker. None without rounds.

    The last begin and the last end of each repetition count, as for an iteration.
    """
    if not rounds:
        return None
    workers = len(rounds[0])
    forward = [[s for own in rounds for s in own[rank].forward_s] for rank in range(workers)]
    backward = [[s for own in rounds for s in own[rank].backward_s] for rank in range(workers)]
    samples = {
        f"{half}/{way}": [s for own in rounds for s in _durations(own, f"{half}/{way}")]
        for half in HALVES
        for way in WAYS
    }
    medians = {key: statistics.median(values) for key, values in samples.items()}
    faster = {half: min(WAYS, key=lambda way: medians[f"{half}/{way}"]) for half in HALVES}
    t_rs, t_ag = (medians[f"{half}/{faster[half]}"] for half in HALVES)
    t_ff, t_bp = (max(map(statistics.median, each)) for each in (forward, backward))
    bound = max(t_ff, t_ag) + max(t_bp, t_rs)
    return Measured(
        workers=workers,
        nbytes=rounds[0][0].nbytes,
        bucket_bytes=bucket_bytes,
        t_ff_s=t_ff,
        t_bp_s=t_bp,
        t_rs_s=t_rs,
        t_ag_s=t_ag,
        bound_s=bound,
        s_max=workers * (t_ff + t_bp) / bound,
        faster=faster,
        samples_s={"forward": _flat(forward), "backward": _flat(backward), **samples},
    )


def _durations(workers: Iterable[Timings], key: str) -> list[float]:
    """Seconds of each repetition, from the last worker's begin to the last worker's end."""
    repetitions: Iterable[Any] = zip(*(own.spans[key] for own in workers), strict=True)
    return [max(end for _, end in each) - max(begin for begin, _ in each) for each in repetitions]


def _flat(lists: Iterable[list[float]]) -> list[float]:
    return [value for values in lists for value in values]
