"""DistributedDataParallel with its default buckets at a scale.

A paced model at scale 0.25 has a quarter of the bytes on links of a quarter of the rate. Buckets
must shrink with it, or a model of eight buckets would become one of two and lose its overlap.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

DEFAULT_MB = 25.0
"""DDP's own bucket size; its first bucket is smaller, 1 MB, only where this is left alone."""

ONE_BUCKET_MB = 1_000_000.0
"""More than any model: all gradients travel together."""


class ScaledDDP(DistributedDataParallel):
    """DDP as it is by default, with both of its bucket sizes multiplied by ``scale``.

    The size of the first bucket is no argument of DDP's, so it is set where DDP reads it.
    """

    def __init__(self, model: nn.Module, scale: float) -> None:
        self._scale = scale
        super().__init__(model)

    def _ddp_init_helper(self, *args: Any, **kwargs: Any) -> Any:
        dist: Any = torch.distributed  # the name is private, but no other way leads to the value
        first = int(dist._DEFAULT_FIRST_BUCKET_BYTES * self._scale)
        self.bucket_bytes_cap = int(self.bucket_bytes_cap * self._scale)
        config = getattr(self, "_bucket_config", None)  # since torch 2.12 or so
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
    """Bytes of each bucket as DDP reports them: the rebuilt ones once there are, in their order."""
    untyped: Any = model
    data = untyped._get_ddp_logging_data()
    text = str(data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes", ""))
    return [int(part) for part in text.replace(" ", "").split(",") if part]
