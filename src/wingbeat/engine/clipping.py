"""Gradient clipping and unscaling on this worker's reduced blocks, without whole gradients.

Workers change their own blocks, and exchange one number each for a norm or an infinity.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from wingbeat.codecs.lowrank import Factors
from wingbeat.collectives import Collectives, Rows
from wingbeat.engine.gradients.bucket import Bucket


def owned_parts(buckets: Iterable[Bucket], rank: int) -> list[torch.Tensor]:
    """Return this worker's reduced blocks, without flags and counts.

    The optimizer must have all parameters in them; otherwise gradients are gathered first.
    """
    parts = []
    for bucket in buckets:
        mine = bucket.owned(rank)
        stop = min(mine.stop, bucket.numel)
        if mine.start < stop:
            parts.append(bucket.flat[mine.start : stop])
    return parts


def _changed_parts(buckets: Iterable[Bucket], rank: int) -> list[torch.Tensor]:
    """Return the part of each bucket to change: all of it if no gather follows."""
    parts = []
    for bucket in buckets:
        if isinstance(bucket.wire, Factors):
            parts.append(bucket.flat[: bucket.numel])
        else:
            parts += owned_parts([bucket], rank)
    return parts


def norm_is_separable(buckets: Iterable[Bucket], norm_type: float) -> bool:
    """Whether the norm of real and imaginary parts is the norm of the complex numbers."""
    return norm_type == 2 or not any(slot.param.is_complex() for b in buckets for slot in b.slots)


def clip_blocks(
    buckets: Sequence[Bucket], collectives: Collectives, max_norm: float, norm_type: float
) -> torch.Tensor:
    """Scale all blocks to a global norm of at most ``max_norm``; return the norm before."""
    rank = collectives.world.rank
    total = _global_norm(owned_parts(buckets, rank), buckets, collectives, norm_type)
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for part in _changed_parts(buckets, rank):
        part.mul_(scale.to(part.device, part.dtype))
    return total


def _global_norm(
    parts: Sequence[torch.Tensor],
    buckets: Sequence[Bucket],
    collectives: Collectives,
    norm_type: float,
) -> torch.Tensor:
    device = parts[0].device if parts else buckets[0].flat.device
    # Half precision would overflow in a sum of squares.
    norms = [
        torch.linalg.vector_norm(
            p, norm_type, dtype=torch.promote_types(p.dtype, torch.float32)
        ).double()
        for p in parts
    ]
    own = torch.zeros(1, dtype=torch.float64, device=device)
    if norms:
        own = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    each = Rows(collectives, own, "norms", device).wait().view(-1)
    total: torch.Tensor = torch.linalg.vector_norm(each, norm_type)
    double = any(bucket.flat.dtype is torch.float64 for bucket in buckets)
    return total if double else total.float()


def unscale_blocks(
    buckets: Sequence[Bucket],
    others: Sequence[torch.Tensor],
    collectives: Collectives,
    found_inf: torch.Tensor,
    inv_scale: torch.Tensor,
) -> None:
    """Unscale this worker's blocks of one dtype and device, and ``others``, like a GradScaler.

    ``found_inf`` becomes 1 on all workers if any has an infinity or NaN, so all skip the same
    steps.
    """
    grads = [*_changed_parts(buckets, collectives.world.rank), *others]
    if grads:
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
    found = Rows(collectives, found_inf, "infinities", found_inf.device).wait()
    found_inf.copy_(found.amax().reshape(found_inf.shape))
