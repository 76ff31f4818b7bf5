"""Exchange in parts: each worker sends one part of its accumulated gradients per iteration (Ako).

Partial gradient exchange (Watcharapichat et al., SoCC 2016). A bucket's gradients are divided into
P partitions. In iteration t, worker i sends partition (i + t) mod P of its accumulated gradients to
all others and clears it. Each worker therefore sends everything within P iterations. It applies its
own gradients at once. An iteration ends when the parts sent in it have arrived (Canary, section
6.1.3).

A worker sends ``(workers - 1) * (ceil(elements / P) + parameters + 4)`` elements of each bucket per
iteration: the part, a flag for each parameter that the worker has used, and step counts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from wingbeat.collectives import Collectives, Gathered, dtype_of
from wingbeat.collectives.packing import narrower_dtype
from wingbeat.engine.gradients.views import ShownGradients
from wingbeat.errors import UsageError
from wingbeat.exchanges.on_host import BucketsOnHost
from wingbeat.schedules.events import Operation
from wingbeat.types import Span, blocks_of
from wingbeat_lab.ako.unsent import UnsentGradients

if TYPE_CHECKING:
    from wingbeat.engine.gradients.bucket import Bucket, Slot
    from wingbeat.engine.gradients.bucketing import Bucketing
    from wingbeat.observe.meter import Section

LOST = math.inf
"""A flag in place of 1: this worker's gradient of the parameter is not finite."""


def turn_of(rank: int, turn: int, partitions: int) -> int:
    """Return the partition that a worker sends in an iteration.

    >>> [turn_of(1, turn, 3) for turn in range(4)]
    [1, 2, 0, 1]
    """
    return (rank + turn) % partitions


class PartialExchange:
    """Sends a part of each bucket's accumulated gradients, and adds the parts of the others.

    ``unsent`` holds the gradients that are not sent yet. ``partitions`` is the number per bucket;
    0: the number of workers, two or more.
    """

    def __init__(self, collectives: Collectives, unsent: UnsentGradients, partitions: int) -> None:
        self._collectives = collectives
        self._unsent = unsent
        self._partitions = partitions or collectives.world.size
        self._kept: dict[int, torch.Tensor] = {}

    def sections(self) -> Sequence[Section]:
        """Return no sections: the interfaces have their own."""
        return ()

    def planned(self, buckets: Sequence[Bucket], forward: Sequence[Bucket]) -> None:  # noqa: ARG002
        """Use these buckets, with unsent gradients kept by parameter, on the host."""
        self._on_host = BucketsOnHost(buckets)
        own = (self._on_host.of(bucket.index) for bucket in buckets)
        self._kept = {bucket.index: self._unsent.of(bucket) for bucket in own}

    def start(self, operation: Operation, bucket: Bucket, chained: bool = False) -> None:  # noqa: ARG002
        """Send a part of the bucket, and add the others' parts to its gradients.

        Results of this all-reduce differ between workers. Parts travel in the bucket's ``wire``
        dtype. The wait for the handle writes to the bucket's buffer. ``chained`` has no effect.
        """
        assert operation is Operation.ALL_REDUCE, operation
        own, turn = self._on_host.of(bucket.index), self._unsent.turn
        self._on_host.start(own, functools.partial(self._send, own, turn))

    @torch.no_grad()
    def _send(self, bucket: Bucket, turn: int) -> Gathered:
        world, kept = self._collectives.world, self._kept[bucket.index]
        lost = self._unsent.add(bucket, kept)
        for slot in lost:
            bucket.flags[bucket.slots.index(slot)] = LOST
        tail = len(bucket.flags) + len(bucket.counts)
        blocks = blocks_of(bucket.numel, self._partitions)
        sent = [blocks[turn_of(rank, turn, self._partitions)] for rank in range(world.size)]
        dtype = self._dtype(bucket)
        width = tail + -(-bucket.numel // self._partitions)
        rows = torch.empty(world.size, width, dtype=dtype, device="cpu")
        arrivals = _Arrivals(bucket, rows, sent, tail, world.rank)
        arrivals.fill(kept)
        handle = self._collectives.all_gather(rows.view(-1), bucket=bucket.index)
        return Gathered(handle, arrivals)

    @staticmethod
    def _dtype(bucket: Bucket) -> torch.dtype:
        return narrower_dtype(dtype_of(bucket.wire), bucket.flat) or bucket.flat.dtype


@dataclass(eq=False)
class _Arrivals:
    """One bucket's rows: from each worker its flags and counts, then its part.

    ``sent`` are the elements that each worker sends; ``tail`` is the number of flags and counts.
    """

    bucket: Bucket
    rows: torch.Tensor
    sent: Sequence[Span]
    tail: int
    rank: int

    def __post_init__(self) -> None:
        # The bucket's buffer may be replaced meanwhile; the results belong to this one.
        self._flat = self.bucket.flat
        self._ends = self._flat[self.bucket.numel : self.bucket.numel + self.tail]

    def fill(self, kept: torch.Tensor) -> None:
        """Move this worker's part out of ``kept``, up to the precision of the rows' dtype."""
        row, span = self.rows[self.rank], self.sent[self.rank]
        row[: self.tail] = self._ends
        part = row[self.tail : self.tail + len(span)]
        row[self.tail + len(span) :] = (
            0  # rows have the same length, but parts may differ by one element
        )
        left = kept[span.start : span.stop]
        if part.dtype.itemsize >= left.dtype.itemsize:
            part.copy_(left)
            left.zero_()
            return
        most = torch.finfo(part.dtype).max  # the remainder is sent next time
        part.copy_(left.clamp(-most, most))
        left.sub_(part)

    @torch.no_grad()
    def add(self) -> None:
        """Add the others' parts to the gradients, and their flags and counts, by rank."""
        for rank, (row, span) in enumerate(zip(self.rows, self.sent, strict=True)):
            if rank != self.rank:
                self._ends.add_(row[: self.tail])
                part = row[self.tail : self.tail + len(span)]
                self._flat[span.start : span.stop].add_(part)
        self._mark()

    def _mark(self) -> None:
        """Mark parameters for which only late gradients arrived; set non-finite ones to NaN.

        All workers must see a non-finite gradient, or some would make a step that others skip.
        """
        start = 0
        flags = self._ends[: len(self.bucket.slots)]
        for position, (slot, flag) in enumerate(
            zip(self.bucket.slots, flags.tolist(), strict=True)
        ):
            gradient = self._flat[start : start + slot.shape.numel()]
            start += slot.shape.numel()
            if flag == LOST:
                gradient.fill_(math.nan)
            elif flag == 0 and bool(gradient.any()):
                flags[position] = 1


class MixedGradients(ShownGradients):
    """Shows gradients that differ between workers, and cannot be accumulated.

    One tensor contains a worker's own gradient and parts of the others'. After an accumulation, the
    part that the others have received would be unknown.
    """

    def __init__(self, bucketing: Bucketing) -> None:
        super().__init__(bucketing)
        self._mixed: list[Slot] = []

    def begin_backward(self) -> None:
        """Raise a `UsageError` if the backward would accumulate into exchanged gradients."""
        slot = next((slot for slot in self._mixed if slot.holds(slot.param.grad)), None)
        if slot is not None:
            where = "optimizer" if slot.owned else "model"
            raise UsageError(
                f"parameter {slot.name!r} may get a gradient on top of one that was exchanged in "
                "parts (Partial, Ako) and differs between workers: before each backward call "
                f"{where}.zero_grad(), and accumulate under no_sync()"
            )

    def on_zero_grad(self, set_to_none: bool) -> None:  # noqa: ARG002
        """The optimizer's gradients are this worker's own from now on."""
        self._mixed = [slot for slot in self._mixed if not slot.owned]

    def show(self, slots: Iterable[Slot] | None = None) -> None:
        """Show the gradients, which now contain parts of the other workers'."""
        super().show(slots)
        self._mixed = self._bucketing.slots
