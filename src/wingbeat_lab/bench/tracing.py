"""Record a few iterations of a row on wingbeat's event stream, for DDP as well."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from wingbeat.observe import trace
from wingbeat.observe.events import stream
from wingbeat_lab.bench import protocol

if TYPE_CHECKING:
    from wingbeat_lab.bench.attach import Attached
    from wingbeat_lab.bench.contenders import Contender

CommHook = Callable[[Any, Any], Any]
"""A DDP communication hook: state and bucket in, future of the bucket's mean out."""

LANE = "ddp"
"""DDP does not report a bucket's interface."""

_last_bucket_ns = 0


def recording(hook: CommHook) -> CommHook:
    """The same hook, with each bucket's communication recorded as an ``all_reduce``."""

    def recorded(state: Any, bucket: Any) -> Any:
        global _last_bucket_ns
        begin = _last_bucket_ns = time.monotonic_ns()
        index, nbytes = bucket.index(), bucket.buffer().nbytes

        def done(future: Any) -> Any:
            stream.record(
                "all_reduce", begin, time.monotonic_ns(), bucket=index, nbytes=nbytes, lane=LANE
            )
            value = future.value()
            return value[0] if isinstance(value, (list, tuple)) else value

        return hook(state, bucket).then(done)

    # DDP compares the annotations by identity, so they must not be strings (postponed).
    recorded.__annotations__ = {}
    return recorded


def record(
    worker: int,
    contender: Contender,
    made: Attached,
    next_loss: Callable[[nn.Module], torch.Tensor],
    *,
    iterations: int,
    pause: Callable[[int], None] = lambda _: None,
) -> None:
    """Run ``iterations`` with recording on. ``save`` writes the events.

    ``pause`` is called with each iteration's number, from 0 on, before it begins.

    wingbeat records its collectives, waits and partial updates itself; the loop records the rest.
    """
    stream.start(worker)
    for i in range(iterations):
        pause(i)
        begin = time.monotonic_ns()
        made.optimizer.zero_grad()
        loss = next_loss(made.model)
        middle = time.monotonic_ns()
        stream.record("forward", begin, middle)
        torch.autograd.backward(loss)
        end = time.monotonic_ns()
        stream.record("backward", middle, end)
        made.optimizer.step()
        stepped = time.monotonic_ns()
        stream.record("step", end, stepped)
        if not contender.traits.in_parts:
            stream.record("update", end, stepped)
        if middle < _last_bucket_ns < end:
            # After DDP's last bucket, backward only waits.
            stream.record("wait", _last_bucket_ns, end)


def save(folder: Path, row: int, worker: int, variant: str) -> None:
    """Stop recording and write this worker's events."""
    trace.save(stream.stop(), protocol.part(folder, row, worker, variant))
