"""A worker's measurements for ``speedup``: the model alone, and then the links alone."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wingbeat_lab.bench import models
from wingbeat_lab.bench.config import Checked

if TYPE_CHECKING:
    import torch

    from wingbeat.collectives import Collectives
    from wingbeat.transport.world import World


@dataclass(frozen=True, slots=True)
class Quantiles:
    """The median and the range of the middle 80% of the values, in their unit."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Quantiles:
        """Quantiles of ``values``, with linear interpolation."""
        ordered = sorted(values)
        return cls(*(_quantile(ordered, share) for share in (0.5, 0.1, 0.9)))


def _quantile(ordered: Sequence[float], share: float) -> float:
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


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


PASSES = 2
"""Timed forward and backward passes in a round, after one untimed pass."""

NORMAL_PASSES = 20
"""Passes for the duration of a normal iteration, measured once: a real model's are short."""

REPETITIONS = 2
"""Timed runs of each collective in each way in a round."""


def normal_s(checked: Checked, world: World) -> float:
    """Return the seconds that a normal iteration computes, the same for all rows and workers.

    A paced model specifies forward and backward. For a real one, all workers measure them at once;
    the result is the slowest worker's median. PeerError if a worker fails.
    """
    stated = checked.model.compute_s()
    if stated is not None:
        return sum(stated)
    forward, backward, _ = _compute(checked, world, NORMAL_PASSES)
    own = statistics.median(f + b for f, b in zip(forward, backward, strict=True))
    return max(float(each) for each in world.exchange("normal iteration", own))


def timings(checked: Checked, world: World) -> Timings:
    """Measure forward, backward, reduce-scatter and all-gather once, with all workers at once."""
    forward, backward, nbytes = _compute(checked, world, PASSES)
    gc.collect()
    direct = checked.lab.kind == "bcube" and checked.config.per_host == 1
    topology = "bcube" if direct else "ring"  # a ring over intermediate hosts would be slower
    spans = _communicate(world, nbytes, checked.bucket_bytes, topology)
    return Timings(forward, backward, spans, nbytes)


def gradient_bytes(model: torch.nn.Module) -> int:
    """Bytes of all the gradients of ``model``."""
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def _compute(checked: Checked, world: World, passes: int) -> tuple[list[float], list[float], int]:
    """Seconds of each forward and backward without communication or optimizer."""
    import torch
    import torch.distributed as dist

    seed = checked.config.seed
    built = models.build(checked.model, rank=world.rank, workers=world.size, seed=seed)
    forward, backward = [], []
    dist.barrier()
    for _ in range(1 + passes):
        built.model.zero_grad()
        begin = time.monotonic()
        loss = built.loss(built.model)
        middle = time.monotonic()
        torch.autograd.backward(loss)
        backward.append(time.monotonic() - middle)
        forward.append(middle - begin)
    return forward[1:], backward[1:], gradient_bytes(built.model)


def _communicate(
    world: World, nbytes: int, bucket_bytes: int, topology: str
) -> dict[str, list[Span]]:
    """Begin and end of each collective, by half and way."""
    import torch

    from wingbeat.collectives import Collectives

    collectives = Collectives(world, topology)
    flat = torch.ones(-(-nbytes // 4))
    buckets = list(flat.split(max(1, bucket_bytes // 4)))
    pieces = {"whole": [flat], "buckets": buckets}
    for half in HALVES:  # the first messages warm up connections and memory
        _run(collectives, half, buckets[:1])
    spans: dict[str, list[Span]] = {}
    for _ in range(REPETITIONS):
        for way in WAYS:
            for half in HALVES:
                spans.setdefault(f"{half}/{way}", []).append(_run(collectives, half, pieces[way]))
    return spans


def _run(collectives: Collectives, half: str, pieces: list[torch.Tensor]) -> Span:
    """Submit everything at once; wait for the results, not until the last send has drained."""
    from torch import distributed as dist

    start = collectives.reduce_scatter if half == "reduce_scatter" else collectives.all_gather
    dist.barrier()
    begin = time.monotonic()
    handles = [start(piece) for piece in pieces]
    for handle in handles:
        handle.wait_received()
    end = time.monotonic()
    for handle in handles:
        handle.wait()
    return begin, end
