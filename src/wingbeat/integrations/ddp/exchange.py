"""The exchange of one bucket: an encoded sum, by blocks or gathered."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wingbeat.codecs import Coding
from wingbeat.codecs.coding import Region
from wingbeat.codecs.feedback import Residuals
from wingbeat.collectives import Encoded
from wingbeat.collectives.encoded import GatheredSum
from wingbeat.collectives.nccl import BlockSum, GroupRows
from wingbeat.transport.nccl import NcclGroup
from wingbeat.types import Span

_ALIGN = 16
"""Blocks are cut at multiples of this number of elements, for the speed of kernels."""

Between = Callable[[], None]
"""Work of a worker while a collective runs."""


@dataclass(frozen=True)
class HookBucket:
    """One of DDP's buckets in one iteration.

    ``where`` names it in messages. ``buffer`` holds flat gradients of any float dtype, and the
    average replaces them. ``keep_unused``: DDP may drop the average of parameters that no worker
    used.
    """

    where: str
    buffer: Tensor
    names: Sequence[str]
    shapes: Sequence[Sequence[int]]
    keep_unused: bool

    @property
    def numels(self) -> list[int]:
        """Elements of each parameter."""
        return [math.prod(shape) for shape in self.shapes]

    def scaled(self, size: int) -> Tensor:
        """Return this worker's share of the average in float32, in place if the dtype allows."""
        return self.buffer.to(torch.float32).mul_(1.0 / size)

    def average(self, found: Tensor) -> Tensor:
        """Copy ``found`` into the buffer and return the buffer."""
        if found is not self.buffer:
            self.buffer.copy_(found)
        return self.buffer

    def parameters_in(self, span: Span) -> list[slice]:
        """Return the part of ``span`` that belongs to each parameter, as slices of the buffer."""
        parts, begin = [], 0
        for numel in self.numels:
            low, high = max(span.start, begin), min(span.stop, begin + numel)
            if low < high:
                parts.append(slice(low, high))
            begin += numel
        return parts


@dataclass(eq=False)
class HookExchange:
    """An encoded sum of one bucket; call `prepare`, then `run`, once each.

    One residual covers both encodings of a sum by blocks: in other workers' blocks the error of
    what this worker sent to their owners, in its own block the error of the average that it sent to
    all. ``group`` belongs to this exchange alone. If ``gathered``, all workers receive all
    payloads; otherwise each worker averages a block. With ``momentum`` the residuals include a
    velocity.
    """

    bucket: HookBucket
    group: NcclGroup
    residuals: Residuals
    regions: Sequence[Region]
    gathered: bool
    momentum: bool = False

    def prepare(self) -> None:
        """Do the work that does not communicate."""
        bucket, rank, size = self.bucket, self.group.rank, self.group.size
        self._values = bucket.scaled(size)
        residual = self._memory(self.residuals.flat_for)
        wire = Encoded(self._coding(), residual)
        self._sum: BlockSum | GatheredSum
        if self.gathered:
            velocity = self._memory(self.residuals.velocity_for) if self.momentum else None
            self._sum = GatheredSum(self._values, wire, rank, size, bucket.where, velocity)
        else:
            blocks = _aligned_blocks(self._values.numel(), size)
            self._sum = BlockSum(self._values, wire, blocks, rank, bucket.where)
        self._sum.encode()

    def run(self, between: Between) -> Tensor:
        """Communicate, and return the bucket's buffer with the average.

        Raises:
            PeerError: a worker is lost, or sent a malformed payload.
        """
        rows = GroupRows(self.group, self.bucket.where, between)
        if isinstance(self._sum, GatheredSum):
            rows.all_gather(self._sum.rows)
            self._sum.add()
        else:
            self._sum.reduce(rows)
            self._sum.spread(rows)
        return self.bucket.average(self._values)

    def _memory(self, kept: Callable[..., Tensor]) -> Tensor:
        names, numels, buffer = self.bucket.names, self.bucket.numels, self.bucket.buffer
        return kept(names, numels, buffer.numel(), buffer.device)

    def _coding(self) -> Coding:
        bucket, regions = self.bucket, self.regions
        return _KeepingUnused(regions, bucket) if bucket.keep_unused else Coding(regions)


class _KeepingUnused(Coding):
    """A `Coding` that keeps the residuals of parameters without a gradient.

    DDP drops the average of a parameter that no worker used (``find_unused_parameters``), so values
    sent for it would be lost.
    """

    def __init__(self, regions: Sequence[Region], bucket: HookBucket) -> None:
        super().__init__(regions)
        self._bucket = bucket

    def encode(
        self,
        buffer: Tensor,
        span: Span,
        payload: Tensor,
        residual: Tensor | None = None,
        velocity: Tensor | None = None,
    ) -> None:
        """Encode ``buffer[span]`` without the residuals of those parameters."""
        unused = _all_zero(buffer, self._bucket.parameters_in(span))
        kept = [
            (memory[part], memory[part].clone())
            for memory in (residual, velocity)
            for part in unused
            if memory is not None
        ]
        for place, _ in kept:
            place.zero_()
        super().encode(buffer, span, payload, residual, velocity)
        for place, before in kept:
            place += before


def _all_zero(values: Tensor, parts: Sequence[slice]) -> list[slice]:
    if not parts:
        return []
    used = torch.stack([values[part].any() for part in parts]).tolist()
    return [part for part, any_used in zip(parts, used, strict=True) if not any_used]


def _aligned_blocks(numel: int, size: int) -> list[Span]:
    """Return a block for each of ``size`` workers; the last ones may be empty."""
    block = -(-numel // (size * _ALIGN)) * _ALIGN
    return [Span(min(numel, p * block), min(numel, (p + 1) * block)) for p in range(size)]
