"""DistributedDataParallel with its default buckets at a scale.

A paced model at scale 0.25 has a quarter of the bytes on links of a quarter of the rate. Unless its
buckets shrink alike, a model of eight buckets has two and loses its overlap.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

DEFAULT_MB = 25.0
"""DDP's default bucket size. Only with this default is its first bucket smaller, 1 MB."""

ONE_BUCKET_MB = 1_000_000.0
"""Larger than any model: all gradients are in one bucket."""


class ScaledDDP(DistributedDataParallel):
    """Default DDP with both of its bucket sizes multiplied by ``scale``.

    The size of the first bucket is no argument of DDP, so it is set where DDP reads it.
    """

    def __init__(self, model: nn.Module, scale: float) -> None:
        self._scale = scale
        super().__init__(model)

    def _ddp_init_helper(self, *args: Any, **kwargs: Any) -> Any:
        dist: Any = torch.distributed  # the only access to this value is by a private name
        first = int(dist._DEFAULT_FIRST_BUCKET_BYTES * self._scale)
        self.bucket_bytes_cap = int(self.bucket_bytes_cap * self._scale)
        config = getattr(self, "_bucket_config", None)  # from about torch 2.12 on
        if config is not None:
            self._bucket_config = dataclasses.replace(
                config, bucket_bytes_cap=self.bucket_bytes_cap, first_bucket_bytes_cap=first
            )
        untyped: Any = super()
        usual = dist._DEFAULT_FIRST_BUCKET_BYTES
        dist._DEFAULT_FIRST_BUCKET_BYTES = first
        try:
            return untyped._ddp_init_helper(*args, **kwargs)
        finally:
            dist._DEFAULT_FIRST_BUCKET_BYTES = usual


def wrap(model: nn.Module, *, mb: float, scale: float) -> DistributedDataParallel:
    """DDP with buckets of ``mb`` MB (2**20 bytes), times ``scale``."""
    if mb != DEFAULT_MB:
        return DistributedDataParallel(model, bucket_cap_mb=mb * scale)
    return DistributedDataParallel(model) if scale == 1.0 else ScaledDDP(model, scale)


def buckets(model: DistributedDataParallel) -> list[int]:
    """Bytes of each bucket, in DDP's order; those of the rebuilt buckets if they exist."""
    untyped: Any = model
    data = untyped._get_ddp_logging_data()
    text = str(data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes", ""))
    return [int(part) for part in text.replace(" ", "").split(",") if part]
