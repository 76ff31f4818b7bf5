"""This worker's reduced blocks of the gradients, and what all workers' blocks have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from wingbeat.sync.bucket import Bucket
from wingbeat.types import Span

if TYPE_CHECKING:
    from wingbeat.sync.engine import Engine


def owned_parts(engine: Engine, bucket: Bucket) -> Iterator[torch.Tensor]:
    """Yield this worker's reduced block of the bucket, cut to the optimizer's parameters."""
    mine = engine.collectives.owned(bucket.flat.numel())
    for span in _optimized_spans(engine, bucket):
        start, stop = max(span.start, mine.start), min(span.stop, mine.stop)
        if start < stop:
            yield bucket.flat[start:stop]


def _optimized_spans(engine: Engine, bucket: Bucket) -> Iterator[Span]:
    start = end = 0
    for slot in bucket.slots:
        size = slot.param.numel()
        if not engine.partial.owns(slot.param):
            if end > start:
                yield Span(start, end)
            start = end + size
        end += size
    if end > start:
        yield Span(start, end)


def global_norm(engine: Engine, parts: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the norm over all workers' ``parts``, a scalar, equal on every worker."""
    size, rank = engine.world.size, engine.world.rank
    device = parts[0].device if parts else engine.buckets[0].flat.device
    each = torch.zeros(size, dtype=torch.float64, device=device)
    # Half precision cannot hold the sum of many squares.
    norms = [
        torch.linalg.vector_norm(
            p, norm_type, dtype=torch.promote_types(p.dtype, torch.float32)
        ).double()
        for p in parts
    ]
    if norms:
        each[rank] = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    engine.collectives.all_gather(each, label="norms").wait()
    total: torch.Tensor = torch.linalg.vector_norm(each, norm_type)
    double = any(bucket.flat.dtype is torch.float64 for bucket in engine.buckets)
    return total if double else total.float()
