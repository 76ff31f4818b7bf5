"""A bucket's flat buffer, and the gradients that are views of it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from wingbeat.collectives import Handle, Wire
    from wingbeat.sync.partial import GroupSnapshot


class Prior(enum.Enum):
    """What the optimizer would see in ``p.grad`` if nothing were added to it."""

    NONE = enum.auto()
    ZERO = enum.auto()
    """A gradient of zeros, from ``zero_grad(set_to_none=False)``."""
    KEPT = enum.auto()
    """The bucket's view holds a gradient that still counts, though ``p.grad`` is None."""


class Slot:
    """One parameter's place in a bucket."""

    __slots__ = ("bucket", "index", "name", "param", "prior", "ready", "used", "view")

    def __init__(self, index: int, name: str, param: torch.nn.Parameter) -> None:
        self.index = index
        self.name = name
        self.param = param
        self.prior = Prior.NONE
        self.ready = False
        self.used = False
        self.bucket: Bucket
        self.view: torch.Tensor

    def fill(self, scale: float) -> bool:
        """Put the gradient times ``scale`` into the view; False if there is no gradient at all.

        What the view already holds counts when autograd accumulated into it, or when the
        gradient was kept there.
        """
        grad = self.param.grad
        if grad is self.view:
            self.view.mul_(scale)
        elif self.prior is Prior.KEPT:
            if grad is not None:
                self.view.add_(grad.detach())
            self.view.mul_(scale)
        elif grad is not None:
            torch.mul(grad.detach(), scale, out=self.view)
        else:
            self.view.zero_()
            return self.prior is Prior.ZERO
        return True


class Bucket:
    """Parameters of one dtype and device, whose gradients travel in one flat buffer.

    The buffer ends with one flag per parameter. A worker that has a gradient for it adds 1, so
    that the sum tells, at no extra message, whether any worker used the parameter.

    Attributes:
        flat: the gradients, end to end, then the flags, then zeros up to ``multiple``.
        handle: the last collective on ``flat``.
        wire: what its gradients travel as in this iteration.
        snapshot: the settings of a step whose update is due when ``handle`` is done.
        kept: whether the gradients in ``flat`` still count, as nobody has zeroed them.
        missing: how many gradients the bucket still waits for in this backward.
    """

    def __init__(self, index: int, slots: Sequence[Slot], multiple: int = 1) -> None:
        self.index = index
        self.slots = list(slots)
        params = [slot.param for slot in slots]
        self.numel = sum(p.numel() for p in params)
        first = params[0]
        used = self.numel + len(slots)
        length = -(-used // multiple) * multiple
        self.flat = torch.zeros(length, dtype=first.dtype, device=first.device)
        self.flags = self.flat[self.numel : used]
        self.handle: Handle | None = None
        self.wire: Wire | None = None
        self.snapshot: GroupSnapshot | None = None
        self.kept = False
        self.missing = len(slots)
        offset = 0
        for slot in slots:
            end = offset + slot.param.numel()
            slot.bucket = self
            slot.view = self.flat[offset:end].view(slot.param.shape)
            offset = end

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

    def write_flags(self) -> None:
        """Tell the other workers which parameters have a gradient here."""
        self.flags.fill_(1)
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
