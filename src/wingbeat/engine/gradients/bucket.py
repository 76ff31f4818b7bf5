"""Flat buffers: of buckets, with gradients as views and step counts, and of packed tensors."""

from __future__ import annotations

import functools
import operator
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

from wingbeat.engine.gradients.placed import is_placed, local, place
from wingbeat.errors import PeerError, UsageError
from wingbeat.types import Span, blocks_of

if TYPE_CHECKING:
    from wingbeat.collectives import Collectives, WireFormat

COUNT_MODULUS = 128
"""Modulus of step counts in buckets; bfloat16 and float16 represent all of these integers."""

_ALIGN = 16

_is_used = operator.attrgetter("used")


class Slot:
    """One parameter's place in a bucket.

    Attributes:
        elements: elements of the buffer that the gradient occupies; two for a complex number.
        view: the gradient's place in the bucket's buffer, at ``address``.
        kind: the dtype of ``view``, and the type of its device.
        shown: the same memory, as users see it in ``p.grad``.
        pending: the placeholder in ``p.grad`` until the gradient is gathered; None under schedules
            that reduce whole gradients.
        ready: whether its gradient has been copied into the bucket in this backward.
        used: whether this worker had a gradient for it.
        owned: whether the optimizer updates the parameter.
        fully_connected: whether only fully connected layers have the parameter.
        shape: of the part of the parameter that this rank holds, as are all other sizes here.
        placed: whether the parameter is a `DTensor`; ``shown`` is one then.
    """

    __slots__ = (
        "__weakref__",
        "address",
        "bucket",
        "elements",
        "fully_connected",
        "index",
        "kind",
        "name",
        "owned",
        "param",
        "pending",
        "placed",
        "ready",
        "shape",
        "shown",
        "strides",
        "used",
        "view",
    )

    def __init__(
        self, index: int, name: str, param: torch.nn.Parameter, fully_connected: bool = False
    ) -> None:
        self.index = index
        self.fully_connected = fully_connected
        self.name = name
        self.param = param
        self.placed = is_placed(param)
        part = local(param)
        self.shape = part.shape
        self.elements = part.numel() * (2 if param.is_complex() else 1)
        self.pending: Any = None
        self.ready = False
        self.used = False
        self.owned = False
        self.strides = strides_of(part)  # `distribute` compares them between workers
        self.bucket: Bucket
        self.view: torch.Tensor
        self.shown: torch.Tensor
        self.address: int
        self.kind: tuple[torch.dtype, str]

    def holds(self, grad: torch.Tensor | None) -> bool:
        """Whether ``grad``, read from ``p.grad``, is the buffer's view or its placeholder."""
        if grad is self.shown:
            return self.in_place
        return grad is not None and (grad is self.pending or grad is self.view)

    @property
    def in_place(self) -> bool:
        """Whether ``shown`` is the buffer's memory: a user may assign to ``p.grad.data``."""
        return (local(self.shown) if self.placed else self.shown).data_ptr() == self.address

    def expose(self, part: torch.Tensor) -> torch.Tensor:
        """Return ``part``, which has the form of ``view``, in the form of the parameter."""
        return place(part, self.param) if self.placed else part

    def is_referenced(self) -> bool:
        """Whether any object other than this slot refers to one of its tensors."""
        # Two references: the slot's and the argument. The placeholder refers to the view.
        waiting = self.pending is not None
        return (
            sys.getrefcount(self.shown) > 2
            or (self.placed and sys.getrefcount(local(self.shown)) > 2)
            or sys.getrefcount(self.view) > 2 + waiting
            or (waiting and sys.getrefcount(self.pending) > 2)
        )


def show(slots: Iterable[Slot]) -> None:
    """Set ``p.grad`` to the gradients in the buffers; raises as `check_kind`."""
    for slot in slots:
        if slot.param.dtype is not slot.view.dtype:
            check_kind(slot.name, local(slot.param), slot.view)
        if not slot.in_place:
            slot.shown = slot.expose(slot.view.detach())
        slot.param.grad = slot.shown


def fill(slots: Sequence[Slot], scale: float) -> None:
    """Write the gradients of a bucket's ``slots``, times ``scale``, into their views.

    Slots become ``ready``, and those with a gradient ``used``. Call it without gradients enabled.
    """
    factor = _factor(scale, *slots[0].kind)
    for slot in slots:
        grad = slot.param.grad
        slot.ready, slot.used = True, grad is not None
        if grad is None:
            slot.view.zero_()
        elif slot.holds(grad):
            slot.view.mul_(factor)
        else:
            torch.mul(local(grad) if slot.placed else grad, factor, out=slot.view)


@functools.lru_cache(maxsize=32)
def _factor(scale: float, dtype: torch.dtype, device: str) -> Any:
    # A cached tensor avoids a conversion that takes as long as the product of a small gradient. A
    # narrow dtype would round it first.
    if device != "cpu" or dtype not in (torch.float32, torch.float64):
        return scale
    with _disable_current_modes(), torch.inference_mode(False):  # the result is cached
        return torch.tensor(scale, dtype=dtype, device="cpu")


class PendingOperation(Protocol):
    """An operation that has been started on a bucket's buffer."""

    def done(self) -> bool:
        """Whether `wait` would return, or raise, without blocking."""

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call ``callback`` once, when the operation has finished or failed."""

    def wait(self) -> None:
        """Block until the buffer is no longer used; raise a `PeerError` if a peer failed."""

    def wait_received(self) -> None:
        """Block until the result can be read; raises as `wait`."""


class Bucket:
    """Parameters of one dtype and device, whose gradients are sent in one flat buffer.

    Complex gradients are stored as alternating real and imaginary parts. The buffer ends with one
    flag per parameter and one step count per worker. A worker that has a gradient for a parameter
    adds 1 to its flag, so the sum shows whether any worker used the parameter, without another
    message. Each worker adds its number of steps modulo `COUNT_MODULUS`, plus 1, to its own count.

    Attributes:
        flat: the concatenated gradients, then flags and counts, then zeros up to a multiple of the
            number of workers.
        handle: the last collective on ``flat``.
        wire: the encoding of its gradients in this iteration.
        due: whether an update of its parameters is due when ``handle`` is done.
        missing: the number of gradients that the bucket still lacks in this backward.
        blocks: the part of ``flat`` that each worker reduces; None for nearly equal blocks.
    """

    def __init__(
        self, index: int, slots: Sequence[Slot], workers: int = 1, strided: bool = False
    ) -> None:
        self.index = index
        self._workers = workers
        self._strided = strided
        self.slots = list(slots)
        self.numel = sum(slot.elements for slot in slots)
        self._length = -(-(self.numel + len(slots) + workers) // workers) * workers
        self.reallocate()
        self._ones_and_zeros = torch.zeros_like(self._tail)
        self._ones_and_zeros[: len(slots)] = 1
        self.handle: PendingOperation | None = None
        self.wire: WireFormat | None = None
        self.due = False
        self.missing = len(slots)
        self.blocks: tuple[Span, ...] | None = None

    def owned(self, rank: int) -> Span:
        """Return the elements of ``flat`` that are complete on ``rank`` after a reduce-scatter."""
        return (self.blocks or blocks_of(self.flat.numel(), self._workers))[rank]

    @property
    def names(self) -> list[str]:
        """The names of its parameters, in forward order."""
        return [slot.name for slot in reversed(self.slots)]

    def reallocate(self) -> None:
        """Allocate a new buffer; references to the old one keep its values."""
        first, used = self.slots[0].param, self.numel + len(self.slots)
        self.flat = torch.zeros(self._length, dtype=first.dtype.to_real(), device=first.device)
        self.flags = self.flat[self.numel : used]
        self.counts = self.flat[used : used + self._workers]
        self._tail = self.flat[self.numel : used + self._workers]
        numbers, offset = self.flat[: self.numel], 0
        if first.is_complex():
            numbers = torch.view_as_complex(numbers.view(-1, 2))
        kind = numbers.dtype, numbers.device.type
        for slot in self.slots:
            end = offset + slot.shape.numel()
            slot.bucket = self
            slot.view = numbers[offset:end].view(slot.shape)
            if self._strided and slot.strides is not None:
                # Autograd lays gradients out like parameters, and fused optimizers rely on it.
                slot.view = numbers.as_strided(slot.shape, slot.strides, offset)
            slot.shown = slot.expose(slot.view.detach())
            slot.address, slot.kind = slot.view.data_ptr(), kind
            offset = end
        self._aliases = self._count_aliases()

    def is_referenced(self) -> bool:
        """Whether the user refers to gradients removed from ``p.grad``, valid as in DDP."""
        if any(s.holds(s.param.grad) for s in self.slots if s.param.grad is not None):
            return False
        if self._count_aliases() > self._aliases:
            return True
        count, pending = sys.getrefcount, [s.pending for s in self.slots if s.pending is not None]
        # Three references: the slot's, the list's and the argument; placeholders refer to views.
        return (
            max(map(count, [slot.shown for slot in self.slots])) > 3
            or max(map(count, [slot.view for slot in self.slots])) > 3 + bool(pending)
            or (bool(pending) and max(map(count, pending)) > 3)
            # Two references: the DTensor's and the argument.
            or any(count(local(slot.shown)) > 2 for slot in self.slots if slot.placed)
        )

    def _count_aliases(self) -> int:
        count: int = torch._C._storage_Use_Count(self.flat.untyped_storage()._cdata)
        return count

    @property
    def dense(self) -> bool:
        """Whether this worker had a gradient for every parameter, so no flag can be zero."""
        return all(map(_is_used, self.slots))

    def reset(self) -> None:
        """Prepare for the gradients of the next backward."""
        self.missing = len(self.slots)
        for slot in self.slots:
            slot.ready = slot.used = False

    def settle(self) -> None:
        """Wait until no collective uses the buffer."""
        if self.handle is not None:
            self.handle.wait()
            self.handle = None

    def write_tail(self, steps: int | None, rank: int = 0, *, asks: bool = False) -> None:
        """Write the flags of used parameters, and the step count, None without batches.

        The count is negative if this worker ``asks`` all others for something.
        """
        self._tail.copy_(self._ones_and_zeros)
        if steps is not None:
            count = steps % COUNT_MODULUS + 1
            self.counts[rank] = -count if asks else count
        if not self.dense:
            for position, slot in enumerate(self.slots):
                if not slot.used:
                    self.flags[position] = 0

    def contributed(self) -> list[Slot]:
        """Return the slots that any worker had a gradient for, once the buffer is reduced."""
        if self.dense:
            return self.slots
        flags = self.flags.tolist()
        return [slot for slot, flag in zip(self.slots, flags, strict=True) if flag > 0 or slot.used]


def strides_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the strides of a dense tensor in another memory format; None if contiguous."""
    if tensor.is_contiguous():
        return None
    own = tensor.stride()
    return own if torch.empty_like(tensor, device="meta").stride() == own else None


def check_kind(name: str, param: torch.Tensor, view: torch.Tensor) -> None:
    """Raise a `UsageError` unless a parameter has its view's dtype, device and shape."""
    if (param.dtype, param.device, param.shape) != (view.dtype, view.device, view.shape):
        raise UsageError(
            f"parameter {name!r} was {dtype_name(view.dtype)} {tuple(view.shape)} on {view.device} "
            f"at distribute() and is {dtype_name(param.dtype)} {tuple(param.shape)} on "
            f"{param.device} now: convert or move the model first, then make the optimizer, then "
            "call distribute()"
        )


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without ``torch.``."""
    return str(dtype).removeprefix("torch.")


class StepCounter:
    """Counts this worker's optimizer steps since `distribute`, and compares them between workers.

    Each bucket carries all workers' counts, so the check costs no message, and all workers detect a
    difference in the same backward. ``ranks`` are the workers' ranks in the job; default: their
    numbers.

    Attributes:
        admits: whether processes may join; otherwise no count is negative.
        asks: whether this worker asks all others to let a process join.
        asked: whether any worker has asked, which all detect in the same backward.
    """

    def __init__(self, rank: int, ranks: Sequence[int] = ()) -> None:
        """``ranks``: of all workers in the job, by which errors name them; empty: the same."""
        self.count = 0
        self.diverged = False
        self.admits = self.asks = self.asked = False
        self.move(rank, ranks)

    def move(self, rank: int, ranks: Sequence[int]) -> None:
        """Count among other workers; arguments as of the class."""
        self.rank, self._ranks = rank, ranks

    def check(self, counts: Sequence[float]) -> None:
        """Compare counts by rank, 0 without batches; raise a `PeerError` for one out of range."""
        if self.admits and min(counts) < 0:
            self.asked, counts = True, [abs(count) for count in counts]
        if len({count for count in counts if count}) <= 1:
            return
        for rank, count in enumerate(counts):
            if count not in range(COUNT_MODULUS + 1):
                me, peer = self._name(self.rank), self._name(rank)
                raise PeerError(
                    f"rank {me}: rank {peer} sent {count!r} where its number of steps was "
                    f"due, 0 to {COUNT_MODULUS}; all workers have to run the same wingbeat"
                )
        # The number of steps nearest to this worker's.
        half, base = COUNT_MODULUS // 2, self.count
        self.differ(
            {
                rank: base + (int(count) - 1 - base + half) % COUNT_MODULUS - half
                for rank, count in enumerate(counts)
                if count
            }
        )

    def differ(self, steps: Mapping[int, int]) -> NoReturn:
        """Raise a `UsageError` that names every rank's number of steps."""
        self.diverged = True
        listed = _listed({self._name(rank): count for rank, count in steps.items()})
        raise UsageError(
            f"the workers have made different numbers of optimizer steps ({listed}), so "
            "their weights are no longer the same: after each backward call optimizer.step() on "
            "all ranks or on none; to skip a batch, decide so on all ranks alike"
        )

    def _name(self, rank: int) -> int:
        return self._ranks[rank] if self._ranks else rank


def _listed(steps: Mapping[int, int]) -> str:
    """Format every rank's count; consecutive ranks with the same count share an entry.

    >>> _listed({0: 4, 1: 3, 2: 4, 3: 4})
    'rank 0 4, rank 1 3, ranks 2-3 4'
    """
    runs: list[list[int]] = []
    for rank, count in sorted(steps.items()):
        if runs and runs[-1][1:] == [rank - 1, count]:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank, count])
    return ", ".join(
        f"rank {first} {count}" if first == last else f"ranks {first}-{last} {count}"
        for first, last, count in runs
    )


# -- tensors of several dtypes ------------------------------------------------------------


class ByteBuffer:
    """Tensors of any dtype, concatenated as bytes, to be sent in one message."""

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device | None = None) -> None:
        offsets, end = [], 0
        for tensor in tensors:
            offsets.append(end)
            end += -(-tensor.numel() * tensor.element_size() // _ALIGN) * _ALIGN
        if device is None:
            device = tensors[0].device if tensors else torch.device("cpu")
        self.flat = torch.zeros(end, dtype=torch.uint8, device=device)
        self.views = [
            self.flat[a : a + t.numel() * t.element_size()].view(t.dtype).view(t.shape)
            for a, t in zip(offsets, tensors, strict=True)
        ]
        self._now: ByteBuffer | None = None

    @torch.no_grad()
    def pack(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Copy the tensors into the bytes; None leaves its bytes unchanged."""
        given = [tensor for tensor in tensors if tensor is not None]
        views = zip(self.views, tensors, strict=True)
        if given:
            torch._foreach_copy_([view for view, tensor in views if tensor is not None], given)

    @torch.no_grad()
    def unpack(
        self, tensors: Sequence[torch.Tensor | None], where: ByteBuffer | None = None
    ) -> None:
        """Copy the bytes into the tensors; with ``where`` only into those that are equal to it."""
        unchanged = [True] * len(tensors) if where is None else where.equal(tensors)
        written, views = [], []
        for tensor, view, as_before in zip(tensors, self.views, unchanged, strict=True):
            if as_before and tensor is not None:
                # Through `data`, invisible to autograd: batch norm saves its buffers for backward
                # without using them, and a second forward may run before that backward.
                written.append(tensor.data)
                views.append(view)
        if written:
            torch._foreach_copy_(written, views)

    def equal(self, tensors: Sequence[torch.Tensor | None]) -> list[bool]:
        """Return for each tensor whether it equals the packed bytes, bit for bit."""
        pairs = list(zip(tensors, self.views, strict=True))
        fit = [t is not None and t.dtype is v.dtype and t.shape == v.shape for t, v in pairs]
        if all(fits or t is None for fits, t in zip(fit, tensors, strict=True)):
            # Most often all are equal, and one comparison shows it.
            self._now = self._now or ByteBuffer(self.views, self.flat.device)
            self._now.pack([view if tensor is None else tensor for tensor, view in pairs])
            if torch.equal(self._now.flat, self.flat):
                return fit
        return [
            fits and tensor is not None and torch.equal(_bits(tensor), _bits(view))
            for fits, (tensor, view) in zip(fit, pairs, strict=True)
        ]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    # As bytes NaN equals itself, and 0 differs from -0.
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def checksum(tensor: torch.Tensor, before: int = 0) -> int:
    """Return a checksum of a tensor's bits that continues the checksum ``before``."""
    plain = tensor.detach().cpu().contiguous().view(-1)
    return zlib.crc32(plain.view(torch.uint8).numpy().data, before)


def broadcast_now(
    tensors: Sequence[torch.Tensor],
    collectives: Collectives,
    root: int,
    limit: int = 32 << 20,
    label: str = "tensors",
) -> None:
    """Overwrite ``tensors`` with those of rank ``root``, at most ``limit`` bytes at a time."""
    batch: list[torch.Tensor] = []
    nbytes = 0
    for tensor in [*tensors, None]:
        if batch and (tensor is None or nbytes >= limit or tensor.device != batch[0].device):
            packed = ByteBuffer(batch)
            packed.pack(batch)
            if packed.flat.numel():
                collectives.broadcast(packed.flat, root, label=label).wait()
            packed.unpack(batch)
            batch, nbytes = [], 0
        if tensor is not None:
            batch.append(tensor)
            nbytes += tensor.numel() * tensor.element_size()
