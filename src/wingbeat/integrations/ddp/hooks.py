"""The hooks for ``model.register_comm_hook``."""

# No `from __future__ import annotations`: DDP compares a hook's annotations with the types.
from typing import Any

import torch
import torch.distributed as dist

from wingbeat.errors import UsageError
from wingbeat.integrations.ddp.state import SketchState, TopKState
from wingbeat.integrations.ddp.wire import WireState


def sketch_hook(state: SketchState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket's gradients over all workers with sketches of a few bits per value.

    Every worker owns a block of the bucket: it adds the others' sketches to its own in rank order,
    in float32, and sends a sketch of the average to all workers (Canary, section 4.3.1).

    Raises:
        UsageError: ``state`` is not a `SketchState`, or is of another model.
    """
    _check(state, SketchState, "sketch_hook")
    return state.submit(bucket)


def topk_hook(state: TopKState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the largest of a bucket's gradients over all workers.

    Every worker sends its largest values to all workers (Deep Gradient Compression, section 3).

    Raises:
        UsageError: ``state`` is not a `TopKState`, or is of another model.
    """
    _check(state, TopKState, "topk_hook")
    return state.submit(bucket)


def wire_hook(state: WireState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket's gradients over all workers with the codec of the state.

    With ``topk`` all workers receive all payloads, as with `topk_hook`; otherwise each worker
    averages a block and sends it to all, as with `sketch_hook`.

    Raises:
        UsageError: ``state`` is not a `WireState`, or is of another model.
    """
    _check(state, WireState, "wire_hook")
    return state.submit(bucket)


def _check(state: Any, wanted: type, hook: str) -> None:
    if not isinstance(state, wanted):
        raise UsageError(
            f"{hook}: the state is of type {type(state).__name__}; make a {wanted.__name__}(model) "
            f"and pass it to model.register_comm_hook(state, {hook})"
        )
