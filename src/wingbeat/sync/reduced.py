"""This worker's reduced blocks of the gradients, and what all workers' blocks have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from wingbeat.gradients.bucket import Bucket

if TYPE_CHECKING:
    from wingbeat.sync.engine import Engine


def owned_parts(engine: Engine, bucket: Bucket) -> Iterator[torch.Tensor]:
    """Yield this worker's reduced block of the bucket, without what follows the gradients.

    All of these are the optimizer's: where another one has some, gradients are gathered first.
    """
    mine = engine.collectives.owned(bucket.flat.numel())
    stop = min(mine.stop, bucket.numel)
    if mine.start < stop:
        yield bucket.flat[mine.start : stop]


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
