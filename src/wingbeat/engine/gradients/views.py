"""What users see in ``p.grad``: views of the buckets' buffers, at once or when they are whole."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch

from wingbeat.engine.gradients.bucket import Bucket, Slot
from wingbeat.engine.gradients.bucketing import Bucketing
from wingbeat.engine.gradients.pending import Gatherer, PendingGradient
from wingbeat.errors import UsageError


class Views(Protocol):
    """Where the gradients of one model's parameters are shown, and when.

    Attributes:
        hidden: whether gradients may be shown only when somebody looks at them.
    """

    hidden: bool

    def begin(self) -> None:
        """A backward begins whose gradients are to be exchanged.

        Raises:
            UsageError: they were added to ones that nothing can be added to.
        """

    def zeroed(self, set_to_none: bool) -> None:
        """The user drops the gradients, or sets them to zero."""

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

    def lose(self, slot: Slot, why: str) -> None:
        """Have the gradient of ``slot``, which nobody will have, refuse to be read: ``why``."""

    def adding_to(self, slot: Slot | None) -> contextlib.AbstractContextManager[None]:
        """Leave ``slot`` as it is inside: autograd, which is adding to it, must find it so."""


class ShownGradients:
    """Shows the buckets' views as gradients from the beginning."""

    hidden = False

    def __init__(self, bucketing: Bucketing) -> None:
        self._bucketing = bucketing

    def begin(self) -> None:
        """Autograd adds to what all workers have alike."""
        keep_displaced(self._bucketing)

    def zeroed(self, set_to_none: bool) -> None:
        """Nothing to forget."""

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

    def lose(self, slot: Slot, why: str) -> None:  # noqa: ARG002
        """Have no gradient."""
        slot.param.grad = None

    def adding_to(self, slot: Slot | None) -> contextlib.AbstractContextManager[None]:  # noqa: ARG002
        """Nothing: it is shown."""
        return contextlib.nullcontext()


class MixedGradients(ShownGradients):
    """Shows gradients that differ between workers, and to which nothing can be added therefore.

    A worker has its own gradient and parts of the others' in one tensor; after autograd has added
    to that, nobody knows what of it the others have got already.

    Args:
        bucketing: the plan in force.
        owns: whether the optimizer updates a parameter, and zeroes its gradient.
    """

    def __init__(self, bucketing: Bucketing, owns: Callable[[torch.Tensor], bool]) -> None:
        super().__init__(bucketing)
        self._owns = owns
        self._mixed: list[Slot] = []

    def begin(self) -> None:
        """Refuse gradients that were added to exchanged ones.

        Raises:
            UsageError: the gradients of the last backward have not been dropped.
        """
        slot = next((slot for slot in self._mixed if slot.holds(slot.param.grad)), None)
        if slot is not None:
            where = "optimizer" if self._owns(slot.param) else "model"
            raise UsageError(
                f"parameter {slot.name!r} may get a gradient on top of one that was exchanged in "
                "parts (Partial, Ako) and differs between workers: before each backward call "
                f"{where}.zero_grad(), and accumulate under no_sync()"
            )

    def zeroed(self, set_to_none: bool) -> None:  # noqa: ARG002
        """From now on the optimizer's gradients are this worker's own."""
        self._mixed = [slot for slot in self._mixed if not self._owns(slot.param)]

    def show(self, slots: Iterable[Slot] | None = None) -> None:
        """Show what has come of others too."""
        super().show(slots)
        self._mixed = self._bucketing.slots


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

    def begin(self) -> None:
        """Autograd adds to what all workers have alike."""
        keep_displaced(self._bucketing)

    def zeroed(self, set_to_none: bool) -> None:
        """Nothing to forget."""

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

    def lose(self, slot: Slot, why: str) -> None:
        """Leave in ``p.grad`` what refuses to be read."""
        slot.pending.drop(why)
        slot.param.grad = slot.pending
        slot.pending = PendingGradient(slot, self._gatherer)


class SentGradients(HiddenGradients):
    """Shows no gradients: those of backward are this worker's own, and have been sent.

    What stands in ``p.grad`` between backward and step refuses to be read or changed. After a step
    there are none.

    Args:
        bucketing: the plan in force.

    Attributes:
        sent: whether gradients of a backward were sent, and no step has followed.
        spent: whether a step has followed, and no ``zero_grad``.
    """

    hidden = False

    def __init__(self, bucketing: Bucketing) -> None:
        super().__init__(bucketing, _SENT)
        self.sent = self.spent = False

    def begin(self) -> None:
        """Refuse a backward whose gradients would be added to ones that were sent.

        Raises:
            UsageError: there was no step, or no ``zero_grad``, since the last backward.
        """
        if self.sent:
            raise UsageError(
                "a second backward before optimizer.step(): the gradients of the last one, or of a "
                "part of it if an exception has cut it short, were sent to the other workers as "
                "they were made (Canary); call step() after each backward, and accumulate under "
                "no_sync()"
            )
        if self.spent:
            raise UsageError(
                "a backward after optimizer.step() without zero_grad(): its gradients would be "
                "added to ones that other workers have used (Canary); call zero_grad() of the "
                "optimizer that distribute() has returned before each backward, or "
                "model.zero_grad(), and forward and backward under no_sync() where only another "
                "model is to learn, as a GAN's generator; to train with a new optimizer call "
                "wingbeat.release(model, optimizer), and distribute(model, new_optimizer)"
            )

    def zeroed(self, set_to_none: bool) -> None:
        """From now on gradients are new ones, or zeros, which are sent where no others come."""
        if self.spent and not set_to_none:
            for slot in self._bucketing.slots:
                if slot.used and slot.param.grad is None:
                    slot.param.grad = torch.zeros_like(slot.param)
        self.spent = False

    def hide(self) -> None:
        """Hide all, which have been sent."""
        super().hide()
        self.sent = True

    def spend(self) -> None:
        """Have no gradients: a step has followed."""
        for slot in self._bucketing.slots:
            slot.param.grad = None
        self.sent, self.spent = False, True

    def renewed(self, bucket: Bucket) -> None:
        """Have what somebody has kept of the old gradients refuse to be read as ever."""
        for slot in bucket.slots:
            if slot.pending is not None:
                slot.pending.drop()
        super().renewed(bucket)

    def show(self, slots: Iterable[Slot] | None = None) -> None:
        """Nothing: nobody has whole gradients."""


class _Sent:
    """Refuses to make gradients whole that have been sent."""

    def show_gradient(self, slot: Slot) -> None:
        if torch._C._current_graph_task_id() != -1:  # most likely autograd itself
            raise UsageError(
                f"a backward has added to the gradient of parameter {slot.name!r}, or read it, "
                "when it had been sent to the other workers (Canary): call optimizer.step() after "
                "each backward, accumulate with forward and backward under no_sync(), and use "
                "checkpoint(..., use_reentrant=False)"
            )
        raise UsageError(
            f"the gradient of parameter {slot.name!r} was read, changed or added to after "
            "backward: under bounded staleness (Canary) it is this worker's own, and has been "
            "sent; leave p.grad alone between backward() and step(), or use wingbeat.AllReduce()"
        )

    def unscale(
        self,
        grads: list[torch.Tensor],  # noqa: ARG002
        found_inf: torch.Tensor,  # noqa: ARG002
        inv_scale: torch.Tensor,  # noqa: ARG002
    ) -> None:
        raise UsageError(
            "GradScaler under bounded staleness (Canary): scaled gradients have been sent to the "
            "other workers, who may have another scale; train in float32 or bfloat16 without a "
            "scaler (GradScaler(enabled=False)), or use wingbeat.AllReduce()"
        )


_SENT = _Sent()
"""The only one: what refers to it does so weakly."""


def keep_displaced(bucketing: Bucketing) -> None:
    """Give gradients new memory that the user has given to other parameters than they are of.

    Their places in the buffers are about to be written to, in any order.
    """
    places: set[int] = set()
    with torch._C.DisableTorchFunctionSubclass():  # nothing here reads a parameter
        for slot in bucketing.slots:
            grad = slot.param.grad
            if grad is None or slot.holds(grad) or grad.layout is not torch.strided:
                continue
            if isinstance(grad, PendingGradient):
                grad = grad.whole()
            places = places or {b.flat.untyped_storage()._cdata for b in bucketing.buckets}
            if grad.untyped_storage()._cdata in places:
                slot.param.grad = grad.detach().clone()


def replaced(slots: Sequence[Slot], owns: Callable[[torch.Tensor], bool]) -> bool:
    """Whether somebody has put other gradients, or none, where pending ones were."""
    return any(slot.param.grad is not slot.pending for slot in slots if owns(slot.param))
