"""Buckets of an accelerator for exchanges that work on the host: servers, partial exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch

from wingbeat.collectives.pinned import CopiesByDevice, Pair, Waitable, pinned_like
from wingbeat.engine.gradients.bucket import Bucket, PendingOperation


class HostBucket(Bucket):
    """A copy of a bucket's buffer in pinned memory, with what exchanges read of the bucket.

    Its slots are those of the bucket, whose gradients are on the device.

    Attributes:
        of: the bucket.
    """

    def __init__(self, bucket: Bucket) -> None:  # not a bucket of its own: slots have one
        self.of = bucket
        self.index, self.slots, self.numel = bucket.index, bucket.slots, bucket.numel
        self.handle, self.wire, self.blocks = None, bucket.wire, bucket.blocks
        self.renew()

    def renew(self) -> None:
        """Use other memory: a copy to the device may still read the memory used so far."""
        bucket = self.of
        self.flat = pinned_like(bucket.flat)
        used, counts = self.numel + len(bucket.flags), len(bucket.counts)
        self.flags = self.flat[self.numel : used]
        self.counts = self.flat[used : used + counts]


class BucketsOnHost:
    """The host's copies of the buckets of an exchange; buckets of the CPU are used themselves."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._copies = CopiesByDevice()
        self._buckets = {
            bucket.index: bucket if bucket.flat.device.type == "cpu" else HostBucket(bucket)
            for bucket in buckets
        }

    def of(self, index: int) -> Bucket:
        """Return the bucket for an operation; its copy has new memory, and its current encoding."""
        found = self._buckets[index]
        if isinstance(found, HostBucket):
            found.wire = found.of.wire
            found.renew()
        return found

    def start(
        self,
        bucket: Bucket,
        submit: Callable[[], Waitable],
        *,
        out: bool = True,
        back: bool = True,
        into: torch.Tensor | None = None,
    ) -> PendingOperation:
        """Run an operation on a bucket returned by `of`; return its handle, stored in the bucket.

        ``out``: it reads the bucket; ``back``: it writes it, or ``into`` instead, which is of the
        same length. ``submit`` begins it; in another thread once the copy has ended, if there is
        one.
        """
        if not isinstance(bucket, HostBucket):
            bucket.handle = handle = cast("PendingOperation", submit())
            return handle
        whole = Pair(bucket.of.flat, bucket.flat)
        target = whole if into is None else Pair(into, bucket.flat)
        bucket.of.handle = operation = self._copies.of(whole.device.device).start(
            f"bucket {bucket.index}",
            [whole] if out else [],
            submit,
            [target] if back else [],
        )
        return operation
