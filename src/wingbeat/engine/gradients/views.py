"""Contents of ``p.grad``: views of the buckets' buffers, or placeholders for them.

Between DeAR's reduce-scatter and all-gather no worker has a whole gradient. Meanwhile ``p.grad`` is
a placeholder: a tensor without memory, with the gradient's shape, dtype and device. Any operation
on it first gathers the gradients. Unread placeholders cost nothing. Clipping and unscaling gather
nothing: workers change their own blocks, and exchange one number each for a norm or an infinity.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

from wingbeat.collectives import Collectives, Rows, factors_of
from wingbeat.engine.gradients.bucket import Bucket, Slot, show
from wingbeat.engine.gradients.bucketing import Bucketing
from wingbeat.engine.gradients.placed import copies, local
from wingbeat.errors import UsageError
from wingbeat.schedules.events import Schedule
from wingbeat.transport.mesh import Replica

_UNSCALE = torch._amp_foreach_non_finite_check_and_unscale_
"""The function that a GradScaler calls on gradients. A worker's own blocks suffice for it."""

_GONE = (
    "a gradient was read that no worker has whole any more, after optimizer.step() or "
    'zero_grad(); with a divided optimizer (shard_optimizer, update="server") read '
    "gradients before, or keep a clone()"
)

_METADATA_ATTRIBUTES = frozenset(
    {"shape", "dtype", "device", "grad", "requires_grad", "ndim", "layout", "is_leaf", "grad_fn"}
    | {"is_cuda", "is_cpu", "is_sparse", "is_sparse_csr", "is_quantized", "is_meta", "is_mkldnn"}
    | {"is_nested", "names", "itemsize", "nbytes", "output_nr", "_post_accumulate_grad_hooks"}
    | {"_backward_hooks", "retains_grad", "grad_dtype", "_version"}
)
_METADATA_METHODS = frozenset(
    {"size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "is_contiguous"}
    | {"is_floating_point", "is_complex", "is_same_size", "get_device", "storage_offset"}
    | {"requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "__len__"}
    | {"retain_grad", "is_inference", "is_signed", "__hash__"}
)


def reads_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> bool:
    """Whether ``func``, as ``__torch_function__`` gets it, reads or writes elements.

    >>> reads_values(torch.Tensor.mul, ())
    True
    >>> reads_values(torch.Tensor.size, ())
    False
    """
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        return getattr(getattr(func, "__self__", None), "__name__", "") not in _METADATA_ATTRIBUTES
    if name == "type":
        return len(args) > 1 or bool(kwargs)  # with a dtype it converts
    return name not in _METADATA_METHODS


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a call's arguments, also in nested lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


# -- placeholders -------------------------------------------------------------------------


class Gatherer(Protocol):
    """Gathers gradients."""

    def show_gradient(self, slot: Slot) -> None:
        """Gather ``slot``'s gradient, because its placeholder is read."""

    def unscale(
        self, grads: list[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor
    ) -> None:
        """Multiply ``grads``, some of them placeholders; set ``found_inf`` to 1 if not finite."""


class PendingGradient(torch.Tensor):
    """A placeholder for the gradient in ``slot.view`` until it is gathered."""

    _view: torch.Tensor
    _slot: weakref.ref[Slot]
    _gatherer: weakref.ref[Gatherer]
    _dropped: str

    @staticmethod
    def __new__(cls, slot: Slot, gatherer: weakref.ref[Gatherer]) -> PendingGradient:
        """Make a placeholder for the slot's current view."""
        view = slot.expose(slot.view)
        made: PendingGradient = torch.Tensor._make_wrapper_subclass(
            cls, view.shape, strides=view.stride(), dtype=view.dtype, device=view.device
        )
        # p.grad must not refer to p: the garbage collector does not detect that cycle.
        made._view = view
        made._slot = weakref.ref(slot)
        made._gatherer = gatherer
        made._dropped = ""
        return made

    def __init__(self, *_args: Any) -> None:
        pass

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # On whole gradients; if it only reads metadata, on the placeholders.
        kwargs = kwargs or {}
        if func is _UNSCALE and not kwargs:
            gatherer = next(g.__dict__["_gatherer"]() for g in args[0] if isinstance(g, cls))
            if gatherer is not None:
                gatherer.unscale(*args)
                return None
        if not reads_values(func, args, kwargs):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return func(*_whole(args), **_whole(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Calls that bypass Python, such as autograd's accumulation.
        return func(*_whole(args), **_whole(kwargs or {}))

    def slot(self) -> Slot | None:
        """Return the slot whose current placeholder this is; None for an old one."""
        slot: Slot | None = self.__dict__["_slot"]()
        current = slot is not None and slot.pending is self and not self.__dict__["_dropped"]
        return slot if current else None

    def drop(self, why: str = "") -> None:
        """Raise an error with this message at each later read."""
        self.__dict__["_dropped"] = why or _GONE

    def whole(self) -> torch.Tensor:
        """Return the whole gradient; raise a `UsageError` if it is incomplete or was dropped."""
        own = self.__dict__
        gatherer, slot = own["_gatherer"](), own["_slot"]()
        view: torch.Tensor = own["_view"]
        if own["_dropped"]:
            raise UsageError(own["_dropped"])
        if gatherer is not None and slot is not None and slot.pending is self:
            gatherer.show_gradient(slot)
            if slot.pending is self:
                slot.bucket.settle()
                if slot.param.grad is slot.shown:
                    view = slot.shown  # its data may be replaced, unlike the view's
        return view


@functools.cache
def _placed_class() -> Any:
    """Return the class of placeholders for a `DTensor`: ``fully_shard`` adds to its local part."""
    from torch.distributed.tensor import DTensor

    class PlacedPendingGradient(PendingGradient, DTensor):  # type: ignore[misc]
        """A placeholder for a `DTensor`."""

        @property
        def _local_tensor(self) -> torch.Tensor:
            return self.whole()._local_tensor  # type: ignore[attr-defined,no-any-return]

        @_local_tensor.setter
        def _local_tensor(self, part: torch.Tensor) -> None:
            """Do nothing: an addition in place assigns what it has read."""

        @property
        def _spec(self) -> Any:
            return self.__dict__["_view"]._spec

        __torch_dispatch__ = PendingGradient.__torch_dispatch__

    return PlacedPendingGradient


def pending_gradient(slot: Slot, gatherer: weakref.ref[Gatherer]) -> PendingGradient:
    """Make a placeholder for the slot's current view."""
    kind: Any = _placed_class() if slot.placed else PendingGradient
    made: PendingGradient = kind(slot, gatherer)
    return made


def _whole(value: Any) -> Any:
    """Replace placeholders in a nested value by whole gradients."""
    if isinstance(value, PendingGradient):
        return value.whole()
    if isinstance(value, (list, tuple)):
        items = [_whole(item) for item in value]
        if hasattr(value, "_fields"):
            return type(value)(*items)
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    return value


# -- when gradients are shown -------------------------------------------------------------


class ShownGradients:
    """Shows the buckets' views in ``p.grad`` as soon as they contain gradients.

    Attributes:
        hidden: whether ``p.grad`` has placeholders between backward and step.
        accumulating: a slot whose ``p.grad`` has to stay, because autograd is adding to it.
    """

    hidden = False
    accumulating: Slot | None = None

    def __init__(self, bucketing: Bucketing) -> None:
        self._bucketing = bucketing

    def follow(self, schedule: Schedule) -> None:
        """Hide gradients, from the next buckets on, only if ``schedule`` completes them later."""

    def begin_backward(self) -> None:
        """Handle the start of a synchronised backward."""
        clone_displaced(self._bucketing)

    def on_zero_grad(self, set_to_none: bool) -> None:
        """Handle the user's ``zero_grad``."""

    def on_gradients(self, slots: Sequence[Slot]) -> None:
        """Handle the slots' gradients in their bucket, which is about to be sent."""
        show(slot for slot in slots if slot.used)

    def on_new_buffer(self, bucket: Bucket) -> None:
        """Handle a bucket's new buffer with new views."""

    def hide(self) -> None:
        """Handle the end of a backward whose gradients are not yet gathered."""

    def show(self, slots: Iterable[Slot] | None = None) -> None:  # noqa: ARG002
        """Show the whole gradients of these slots, or of all, including other workers'."""
        for bucket in self._bucketing.buckets:
            if not bucket.dense:
                show(bucket.contributed())

    def drop(self) -> None:
        """Invalidate placeholders, because the buffers no longer contain gradients."""

    def lose(self, slot: Slot, why: str) -> None:  # noqa: ARG002
        """Invalidate ``slot``'s gradient, which no worker will have; reads raise ``why``."""
        slot.param.grad = None


class HiddenGradients(ShownGradients):
    """Shows placeholders in ``p.grad`` until one is read.

    Attributes:
        whole: whether the schedule in use completes gradients in backward, so that none is hidden.
    """

    hidden = True
    whole = False

    def __init__(self, bucketing: Bucketing, gatherer: Gatherer) -> None:
        super().__init__(bucketing)
        self._gatherer = weakref.ref(gatherer)

    def follow(self, schedule: Schedule) -> None:
        """Hide gradients, from the next buckets on, only if ``schedule`` completes them later."""
        self.whole = schedule.whole_after_backward
        self.hidden = not self.whole

    def on_gradients(self, slots: Sequence[Slot]) -> None:
        """Hide the gradients: until the all-gather, the buffer holds a partial sum."""
        if self.whole:
            super().on_gradients(slots)
            return
        for slot in slots:
            if slot.used:
                slot.param.grad = slot.pending

    def on_new_buffer(self, bucket: Bucket) -> None:
        """Make placeholders for the new views."""
        for slot in bucket.slots:
            slot.pending = None if self.whole else pending_gradient(slot, self._gatherer)

    def hide(self) -> None:
        """Hide all gradients: another worker may have one where this worker has none."""
        for slot in () if self.whole else self._bucketing.slots:
            if slot.param.grad is not slot.pending:
                slot.param.grad = slot.pending

    def show(self, slots: Iterable[Slot] | None = None) -> None:
        """Replace placeholders by whole gradients, or by None where no worker has one."""
        if self.whole:
            super().show(slots)
            return
        whole: dict[Bucket, set[Slot]] = {}
        for slot in self._bucketing.slots if slots is None else slots:
            if slot.param.grad is not slot.pending or slot is self.accumulating:
                continue
            bucket = slot.bucket
            if bucket not in whole:
                bucket.settle()
                whole[bucket] = set(bucket.contributed())
            if slot in whole[bucket]:
                show([slot])
            else:
                slot.param.grad = None

    def drop(self) -> None:
        """Invalidate the placeholders that the user has kept, and replace them."""
        for slot in self._bucketing.slots:
            if slot.pending is None:
                continue
            shown = slot.param.grad is slot.pending
            if shown:
                slot.param.grad = None  # it refers to the view too
            if slot.is_referenced():
                slot.pending.drop()
                slot.pending = pending_gradient(slot, self._gatherer)
            if shown:
                slot.param.grad = slot.pending

    def lose(self, slot: Slot, why: str) -> None:
        """Leave an invalid placeholder in ``p.grad``."""
        if self.whole:
            super().lose(slot, why)
            return
        slot.pending.drop(why)
        slot.param.grad = slot.pending
        slot.pending = pending_gradient(slot, self._gatherer)


class SentGradients(HiddenGradients):
    """Hides gradients, which are this worker's own and have been sent.

    Placeholders between backward and step raise when they are read or changed. After a step
    ``p.grad`` is None.

    Attributes:
        sent: whether gradients were sent, and no step has followed.
        spent: whether a step has followed, and no ``zero_grad``.
    """

    hidden = False

    def __init__(self, bucketing: Bucketing) -> None:
        super().__init__(bucketing, _SENT)
        self.sent = self.spent = False

    def begin_backward(self) -> None:
        """Raise a `UsageError` if a step or ``zero_grad`` is missing since the last backward."""
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

    def on_zero_grad(self, set_to_none: bool) -> None:
        """Zero the gradients that a step has consumed, unless they are set to None."""
        if self.spent and not set_to_none:
            for slot in self._bucketing.slots:
                if slot.used and slot.param.grad is None:
                    slot.param.grad = torch.zeros_like(slot.param)
        self.spent = False

    def hide(self) -> None:
        """Hide all gradients, which have been sent."""
        super().hide()
        self.sent = True

    def spend(self) -> None:
        """Set all gradients to None after a step."""
        for slot in self._bucketing.slots:
            slot.param.grad = None
        self.sent, self.spent = False, True

    def on_new_buffer(self, bucket: Bucket) -> None:
        """Invalidate the placeholders of the old buffer, and make new ones."""
        for slot in bucket.slots:
            if slot.pending is not None:
                slot.pending.drop()
        super().on_new_buffer(bucket)

    def show(self, slots: Iterable[Slot] | None = None) -> None:
        """Show nothing: no worker has whole gradients."""


class _Sent:
    """Raises an error, because sent gradients cannot be gathered."""

    def show_gradient(self, slot: Slot) -> None:
        if torch._C._current_graph_task_id() != -1:  # probably autograd itself
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

    def unscale(self, *_: Any, **__: Any) -> None:
        raise UsageError(
            "GradScaler under bounded staleness (Canary): scaled gradients have been sent to the "
            "other workers, who may have another scale; train in float32 or bfloat16 without a "
            "scaler (GradScaler(enabled=False)), or use wingbeat.AllReduce()"
        )


_SENT = _Sent()
"""Kept alive here, because views refer to it weakly."""


def clone_displaced(bucketing: Bucketing) -> None:
    """Clone gradients that the user has moved to other parameters' ``p.grad``.

    Their memory in the buffers is about to be overwritten.
    """
    places: set[int] = set()
    with torch._C.DisableTorchFunctionSubclass():  # no operation here reads a parameter
        for slot in bucketing.slots:
            grad = slot.param.grad
            if grad is None or slot.holds(grad) or grad.layout is not torch.strided:
                continue
            if isinstance(grad, PendingGradient):
                grad = grad.whole()
            places = places or {b.flat.untyped_storage()._cdata for b in bucketing.buckets}
            if local(grad).untyped_storage()._cdata in places:
                slot.param.grad = grad.detach().clone()


def replaced(slots: Sequence[Slot]) -> bool:
    """Whether the user has replaced or removed placeholders of the optimizer's parameters."""
    return any(slot.param.grad is not slot.pending for slot in slots if slot.owned)


# -- clipping and unscaling of this worker's reduced blocks --------------------------------


def _owned_parts(buckets: Iterable[Bucket], rank: int) -> list[torch.Tensor]:
    """Return this worker's reduced blocks, without flags and counts.

    The optimizer must have all parameters in them; otherwise gradients are gathered first.
    """
    spans = ((bucket, bucket.owned(rank)) for bucket in buckets)
    return [
        bucket.flat[mine.start : min(mine.stop, bucket.numel)]
        for bucket, mine in spans
        if mine.start < min(mine.stop, bucket.numel)
    ]


def _changed_parts(buckets: Iterable[Bucket], rank: int) -> list[torch.Tensor]:
    """Return the part of each bucket to change: all of it if no gather follows."""
    parts = []
    for bucket in buckets:
        if factors_of(bucket.wire) is not None:
            parts.append(bucket.flat[: bucket.numel])
        else:
            parts += _owned_parts([bucket], rank)
    return parts


def norm_is_separable(
    buckets: Iterable[Bucket], norm_type: float, replica: Replica | None = None
) -> bool:
    """Whether norms of blocks suffice.

    Not if the norm of real and imaginary parts is not that of complex numbers, or if some elements
    are on more ranks of the replica than others.
    """
    if replica is not None:
        params = (slot.param for bucket in buckets for slot in bucket.slots)
        if len({copies(param, replica) for param in params}) > 1:
            return False
    return norm_type == 2 or not any(slot.param.is_complex() for b in buckets for slot in b.slots)


def clip_blocks(
    buckets: Sequence[Bucket], collectives: Collectives, max_norm: float, norm_type: float
) -> torch.Tensor:
    """Scale all blocks to a global norm of at most ``max_norm``; return the norm before."""
    rank = collectives.world.rank
    parts = _owned_parts(buckets, rank)
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
    replica = collectives.world.inside
    if replica is not None and norm_type == float("inf"):
        total = replica.max(total)
    elif replica is not None:
        shared = copies(buckets[0].slots[0].param, replica)
        total = (replica.sum(total.pow(norm_type)) / shared).pow(1 / norm_type)
    if not any(bucket.flat.dtype is torch.float64 for bucket in buckets):
        total = total.float()
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for part in _changed_parts(buckets, rank):
        part.mul_(scale.to(part.device, part.dtype))
    return total


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
    grads = [*_changed_parts(buckets, collectives.world.rank), *map(local, others)]
    if grads:
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
    found = Rows(collectives, found_inf, "infinities", found_inf.device).wait()
    found_inf.copy_(found.amax().reshape(found_inf.shape))
    if collectives.world.inside is not None:
        found_inf.copy_(collectives.world.inside.max(found_inf))
