"""A worker's measurements for ``speedup``: the model alone, and then the links alone."""

from __future__ import annotations

import gc
import statistics
import time

import torch
import torch.distributed as dist

from wingbeat.collectives import Collectives
from wingbeat.transport.world import World
from wingbeat_lab.bench import models
from wingbeat_lab.bench.config import Checked
from wingbeat_lab.bench.speedup import HALVES, WAYS, Span, Timings

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
