"""A bucket's flat buffer, and the gradients that are views of it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

from wingbeat.engine.gradients.convert import check_kind
from wingbeat.types import Span, blocks_of

if TYPE_CHECKING:
    from wingbeat.collectives import WireFormat

COUNTED = 128
"""Steps are counted modulo this in the buckets; bfloat16 and float16 have all these numbers."""


class Slot:
    """One parameter's place in a bucket.

    Attributes:
        elements: how many of the buffer the gradient takes: two for a complex number.
        view: the gradient's place in the bucket's buffer.
        address: where that is in memory.
        shown: the same memory, as users see it in ``p.grad``.
        pending: what stands in ``p.grad`` while the gradient is not whole; None where a schedule
            has no such time.
        ready: whether its gradient has been taken in, in this backward.
        used: whether this worker had a gradient for it.
        fully_connected: whether only fully connected layers have it.
    """

    __slots__ = (
        "__weakref__",
        "address",
        "bucket",
        "elements",
        "fully_connected",
        "index",
        "name",
        "param",
        "pending",
        "ready",
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
        self.elements = param.numel() * (2 if param.is_complex() else 1)
        self.pending: Any = None
        self.ready = False
        self.used = False
        self.strides = strides_of(param)  # of that moment, when all workers had the same
        self.bucket: Bucket
        self.view: torch.Tensor
        self.shown: torch.Tensor
        self.address: int

    def show(self) -> None:
        """Let ``p.grad`` be the gradient in the buffer.

        Raises:
            UsageError: the parameter has another dtype, device or shape than the buffer.
        """
        if self.param.dtype is not self.view.dtype:
            check_kind(self.name, self.param, self.view)
        if self.shown.data_ptr() != self.address:  # somebody assigned to p.grad.data
            self.shown = self.view.detach()
        self.param.grad = self.shown

    def holds(self, grad: torch.Tensor | None) -> bool:
        """Whether ``grad``, found in ``p.grad``, stands for what is in the buffer."""
        if grad is self.shown:
            return self.shown.data_ptr() == self.address
        return grad is not None and (grad is self.pending or grad is self.view)

    def is_kept(self) -> bool:
        """Whether somebody besides this slot refers to one of its tensors."""
        # Two: the slot's own reference, and the argument. What is pending refers to the view.
        waiting = self.pending is not None
        return (
            sys.getrefcount(self.shown) > 2
            or sys.getrefcount(self.view) > 2 + waiting
            or (waiting and sys.getrefcount(self.pending) > 2)
        )

    def fill(self, scale: float) -> bool:
        """Put the gradient times ``scale`` into the view; False if there is no gradient at all.

        What the view already holds counts when autograd accumulated into it.
        """
        grad = self.param.grad
        if grad is None:
            self.view.zero_()
            return False
        factor = _factor(scale, self.view.dtype, self.view.device.type)
        if self.holds(grad):
            self.view.mul_(factor)
        else:
            torch.mul(grad.detach(), factor, out=self.view)
        return True


@functools.lru_cache(maxsize=32)
def _factor(scale: float, dtype: torch.dtype, device: str) -> Any:
    """``scale`` as a product takes it in the least time, to the same bits.

    Torch makes a tensor of a number each time, which takes as long as the product of a small
    gradient. Narrow dtypes are multiplied by the number, which is not rounded first.
    """
    if device != "cpu" or dtype not in (torch.float32, torch.float64):
        return scale
    with _disable_current_modes(), torch.inference_mode(False):  # it is kept for other moments
        return torch.tensor(scale, dtype=dtype, device="cpu")


class UnderWay(Protocol):
    """What is under way on a bucket's buffer."""

    def done(self) -> bool:
        """Whether `wait` would return, or raise, without waiting."""

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Have it called once, when this is done or has failed."""

    def wait(self) -> None:
        """Block until it is done, and nothing reads or writes the buffer any more.

        Raises:
            PeerError: somebody failed or was silent for too long; names who.
        """

    def wait_received(self) -> None:
        """Block until the result can be read; raises as `wait`."""


class Bucket:
    """Parameters of one dtype and device, whose gradients travel in one flat buffer.

    Complex ones travel as real and imaginary parts in turn, which any collective can add, and a
    cast can round. The buffer ends with one flag per parameter. A worker that has a
    gradient for it adds 1, so that the sum tells, at no extra message, whether any worker used the
    parameter. After the flags comes one element per worker, to which that worker alone adds its
    number of steps modulo `COUNTED`, plus 1.

    Attributes:
        flat: the gradients, end to end, then flags and counts, then zeros up to a multiple of the
            number of workers.
        handle: the last collective on ``flat``.
        wire: what its gradients travel as in this iteration.
        due: whether an update of its parameters is due when ``handle`` is done.
        missing: how many gradients the bucket still waits for in this backward.
        blocks: which part of ``flat`` each worker reduces; None: the r-th of nearly equal ones.
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
        self.renew()
        self._ones_and_zeros = torch.zeros_like(self._tail)
        self._ones_and_zeros[: len(slots)] = 1
        self.handle: UnderWay | None = None
        self.wire: WireFormat | None = None
        self.due = False
        self.missing = len(slots)
        self.blocks: tuple[Span, ...] | None = None

    def owned(self, rank: int) -> Span:
        """Return the elements of ``flat`` that a reduce-scatter leaves whole on worker ``rank``."""
        blocks = self.blocks or blocks_of(self.flat.numel(), self._workers)
        return blocks[rank]

    @property
    def names(self) -> list[str]:
        """The names of its parameters, in the order of forward."""
        return [slot.name for slot in reversed(self.slots)]

    def renew(self) -> None:
        """Take new memory for the buffer; whoever refers to the old one keeps it as it is."""
        first, used = self.slots[0].param, self.numel + len(self.slots)
        self.flat = torch.zeros(self._length, dtype=first.dtype.to_real(), device=first.device)
        self.flags = self.flat[self.numel : used]
        self.counts = self.flat[used : used + self._workers]
        self._tail = self.flat[self.numel : used + self._workers]
        numbers, offset = self.flat[: self.numel], 0
        if first.is_complex():
            numbers = torch.view_as_complex(numbers.view(-1, 2))
        for slot in self.slots:
            end = offset + slot.param.numel()
            slot.bucket = self
            slot.view = numbers[offset:end].view(slot.param.shape)
            if self._strided and slot.strides is not None:
                # As autograd lays gradients out: fused optimizers go by it.
                slot.view = numbers.as_strided(slot.param.shape, slot.strides, offset)
            slot.shown = slot.view.detach()
            slot.address = slot.view.data_ptr()
            offset = end
        self._aliases = self._count_aliases()

    def is_kept(self) -> bool:
        """Whether somebody still refers to gradients in the buffer that no ``p.grad`` is any more.

        Under DDP a gradient that was removed from ``p.grad`` stays what it is.
        """
        if any(slot.holds(slot.param.grad) for slot in self.slots):
            return False
        return self._count_aliases() > self._aliases or any(slot.is_kept() for slot in self.slots)

    def _count_aliases(self) -> int:
        count: int = torch._C._storage_Use_Count(self.flat.untyped_storage()._cdata)
        return count

    @property
    def dense(self) -> bool:
        """Whether this worker had a gradient for every parameter, so that no flag can be zero."""
        return all(slot.used for slot in self.slots)

    def reopen(self) -> None:
        """Get ready for the gradients of the next backward."""
        self.missing = len(self.slots)
        for slot in self.slots:
            slot.ready = slot.used = False

    def settle(self) -> None:
        """Wait until nothing on the links reads or writes the buffer any more."""
        if self.handle is not None:
            self.handle.wait()
            self.handle = None

    def write_tail(self, steps: int | None, rank: int = 0) -> None:
        """Tell the other workers which parameters have a gradient here, after how many steps.

        None for ``steps``: this worker has run out of batches, and its steps do not count.
        """
        self._tail.copy_(self._ones_and_zeros)
        if steps is not None:
            self.counts[rank] = steps % COUNTED + 1
        if not self.dense:
            for position, slot in enumerate(self.slots):
                if not slot.used:
                    self.flags[position] = 0

    def contributed(self) -> list[Slot]:
        """Return the slots that some worker had a gradient for, once the buffer is whole."""
        if self.dense:
            return self.slots
        flags = self.flags.tolist()
        return [slot for slot, flag in zip(self.slots, flags, strict=True) if flag > 0 or slot.used]


def strides_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the strides of elements in another order than theirs, without gaps and overlaps."""
    if (
        tensor.is_contiguous()
        or torch.empty_like(tensor, device="meta").stride() != tensor.stride()
    ):
        return None
    return tensor.stride()
