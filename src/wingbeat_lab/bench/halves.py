"""DeAR without one half of each exchange, to measure the cost of the other half (Fig. 8).

The resulting weights are wrong: for timing only.
"""

from __future__ import annotations

from typing import Any

import torch

from wingbeat.collectives import Collectives, Handle
from wingbeat.engine.upgrade import engine_of
from wingbeat.exchanges.collective import CollectiveExchange
from wingbeat.transport.world import World
from wingbeat_lab.bench import protocol


class ReduceScatterOnly(Collectives):
    """Omits the all-gathers of buckets."""

    def all_gather(
        self,
        buffer: torch.Tensor,
        *,
        bucket: int = -1,
        after: Handle | None = None,
        **options: Any,
    ) -> Handle:
        """Complete as soon as ``after`` does, so that the reduce-scatter is still waited for."""
        if bucket < 0:
            return super().all_gather(buffer, bucket=bucket, after=after, **options)
        return after or Handle([])


class AllGatherOnly(Collectives):
    """Omits the reduce-scatters of buckets."""

    def reduce_scatter(self, buffer: torch.Tensor, *, bucket: int = -1, **options: Any) -> Handle:
        """Complete at once."""
        if bucket < 0:
            return super().reduce_scatter(buffer, bucket=bucket, **options)
        return Handle([])

    def all_gather(
        self,
        buffer: torch.Tensor,
        *,
        bucket: int = -1,
        after: Handle | None = None,
        **options: Any,
    ) -> Handle:
        """Gather after ``after``, unless that was omitted."""
        kept = after if after is not None and after.jobs else None
        return super().all_gather(buffer, bucket=bucket, after=kept, **options)


_CLASSES = dict(zip(protocol.ONLY, (ReduceScatterOnly, AllGatherOnly), strict=True))


def use_only(only: str, model: torch.nn.Module, world: World, topology: str) -> None:
    """Make a distributed model's engine exchange one half of each bucket (``protocol.ONLY``)."""
    engine = engine_of(model)
    assert engine is not None, "the model is not distributed"
    halves = _CLASSES[only](world, topology)
    engine.runtime.exchange = CollectiveExchange(halves, engine.compression)
