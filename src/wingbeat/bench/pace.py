"""Codec work at the pace of a bench's links and computation.

A paced model at scale 0.05 has a twentieth of the parameters on links of a twentieth of the rate,
and a bench in slow motion stretches links and computation once more. A codec has a twentieth of
the work then, at the processor's own pace: its share of an iteration would be far too small. Here
each piece of codec work is followed by a sleep, so that it takes as long as its share of the whole
model would. The processor is free meanwhile, as that of another host would be.

The codecs of wingbeat and the hooks of DDP are treated alike. What a processor does beside them
(copies into buckets, sums, TCP) keeps its own pace.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from wingbeat.codecs.coding import Coding
from wingbeat.codecs.factors import Round

SHORTEST_S = 0.2e-3
"""Shorter sleeps end much too late. What is shorter is added to a later one of the thread."""

WORK: tuple[tuple[Any, str], ...] = (
    (Coding, "encode"),
    (Coding, "decode"),
    (Round, "__init__"),
    (Round, "turn"),
    (Round, "keep"),
    (Round, "end"),
    (default_hooks, "fp16_compress_hook"),
    (default_hooks, "bf16_compress_hook"),
    (powerSGD_hook, "powerSGD_hook"),
)
"""Where codec work is done: the owner and the name of each function."""

_owed = threading.local()


def slow_codecs(factor: float) -> Callable[[], None]:
    """Make all codec work of this process take ``factor`` times as long; return what undoes it.

    Args:
        factor: 1 or more. A smaller one changes nothing: no processor can be made faster.
    """
    if factor <= 1.0:
        return lambda: None
    before = [(owner, name, getattr(owner, name)) for owner, name in WORK]
    for owner, name, plain in before:
        setattr(owner, name, slowed(plain, factor))
    future: Any = torch._C.Future
    then = future.then

    # The second half of a hook of DDP's, such as the cast back to float32, is a callback.
    def slowed_then(awaited: Any, callback: Callable[[Any], Any]) -> Any:
        return then(awaited, slowed(callback, factor))

    future.then = slowed_then

    def undo() -> None:
        for owner, name, plain in before:
            setattr(owner, name, plain)
        future.then = then

    return undo


def slowed(work: Callable[..., Any], factor: float) -> Callable[..., Any]:
    """Return ``work`` followed by a sleep of ``factor - 1`` times the CPU time that it took."""

    @functools.wraps(work)
    def run(*args: Any, **options: Any) -> Any:
        if getattr(_owed, "inside", False):  # one codec that uses another is slowed once
            return work(*args, **options)
        _owed.inside, began = True, time.thread_time()
        try:
            return work(*args, **options)
        finally:
            _owed.inside = False
            spent = time.thread_time() - began
            debt = getattr(_owed, "seconds", 0.0) + (factor - 1.0) * spent
            if debt >= SHORTEST_S:
                slept = time.perf_counter()
                time.sleep(debt)
                debt -= time.perf_counter() - slept
            _owed.seconds = debt

    return run
