"""What users see in ``p.grad``: views of the buckets' buffers, at once or when they are whole."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch

from wingbeat.gradients.bucket import Bucket, Slot
from wingbeat.gradients.bucketing import Bucketing
from wingbeat.gradients.pending import Gatherer, PendingGradient


class Views(Protocol):
    """Where the gradients of one model's parameters are shown, and when.

    Attributes:
        hidden: whether gradients may be shown only when somebody looks at them.
    """

    hidden: bool

    def taken(self, slot: Slot) -> None:
        """The slot's gradient is in its bucket, which is about to travel."""

    def renewed(self, bucket: Bucket) -> None:
        """The bucket's buffer, and the views of it, are others than before."""

    def hide(self) -> None:
        """A backward has ended, after which gradients are not whole yet."""

    def show(self, slots: Iterable[Slot] | None = None) -> None:
        """Show what is whole by now; of these slots, or of all."""

    def drop(self) -> None:
        """Have nobody take what is in the buffers for gradients."""

    def adding_to(self, slot: Slot | None) -> contextlib.AbstractContextManager[None]:
        """Leave ``slot`` as it is inside: autograd, which is adding to it, must find it so."""


class ShownGradients:
    """Shows the buckets' views as gradients from the beginning."""

    hidden = False

    def __init__(self, bucketing: Bucketing) -> None:
        self._bucketing = bucketing

    def taken(self, slot: Slot) -> None:
        """Show the bucket's view as the gradient."""
        if slot.used:
            slot.show()

    def renewed(self, bucket: Bucket) -> None:
        """Nothing: views are shown as gradients come."""

    def hide(self) -> None:
        """Nothing: gradients are whole when backward returns."""

    def show(self, slots: Iterable[Slot] | None = None) -> None:  # noqa: ARG002
        """Show what others had a gradient for, where this worker has none."""
        for bucket in self._bucketing.buckets:
            if not bucket.dense:
                for slot in bucket.contributed():
                    slot.show()

    def drop(self) -> None:
        """Nothing: what is shown is a gradient."""

    def adding_to(self, slot: Slot | None) -> contextlib.AbstractContextManager[None]:  # noqa: ARG002
        """Nothing: it is shown."""
        return contextlib.nullcontext()


class HiddenGradients:
    """Has pending gradients stand in ``p.grad`` until somebody looks at one.

    Args:
        bucketing: the plan in force.
        gatherer: makes gradients whole when one is touched; not kept alive.
    """

    hidden = True

    def __init__(self, bucketing: Bucketing, gatherer: Gatherer) -> None:
        self._bucketing = bucketing
        self._gatherer = weakref.ref(gatherer)
        self._added_to: Slot | None = None

    def taken(self, slot: Slot) -> None:
        """Hide the gradient: what the buffer holds until the all-gather is no gradient."""
        if slot.used:
            slot.param.grad = slot.pending

    def renewed(self, bucket: Bucket) -> None:
        """Have what stands for gradients that are not whole stand for the new ones."""
        for slot in bucket.slots:
            slot.pending = PendingGradient(slot, self._gatherer)

    def hide(self) -> None:
        """Hide all: whether another worker has a gradient where this one has none is unknown."""
        for slot in self._bucketing.slots:
            slot.param.grad = slot.pending

    def show(self, slots: Iterable[Slot] | None = None) -> None:
        """Put whole gradients in the place of pending ones, and None where nobody has any."""
        whole: dict[Bucket, set[Slot]] = {}
        for slot in self._bucketing.slots if slots is None else slots:
            if slot.param.grad is not slot.pending or slot is self._added_to:
                continue
            bucket = slot.bucket
            if bucket not in whole:
                bucket.settle()
                whole[bucket] = set(bucket.contributed())
            if slot in whole[bucket]:
                slot.show()
            else:
                slot.param.grad = None

    @contextlib.contextmanager
    def adding_to(self, slot: Slot | None) -> Iterator[None]:
        """Leave ``slot`` as it is inside."""
        self._added_to = slot
        try:
            yield
        finally:
            self._added_to = None

    def drop(self) -> None:
        """Have nobody take what is in the buffers for gradients, who has kept a pending one."""
        for slot in self._bucketing.slots:
            shown = slot.pending is not None and slot.param.grad is slot.pending
            if shown:
                slot.param.grad = None  # which refers to it too
            if slot.pending is not None and slot.is_kept():
                slot.pending.drop()
                slot.pending = PendingGradient(slot, self._gatherer)
            if shown:
                slot.param.grad = slot.pending


def replaced(slots: Sequence[Slot], owns: Callable[[torch.Tensor], bool]) -> bool:
    """Whether somebody has put other gradients, or none, where pending ones were."""
    return any(slot.param.grad is not slot.pending for slot in slots if owns(slot.param))
