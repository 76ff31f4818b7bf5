"""Gradients that are reduced but not gathered: they gather themselves when somebody touches one.

Between DeAR's reduce-scatter and its all-gather no worker has a whole gradient. What stands in
``p.grad`` meanwhile is a tensor without memory that has the gradient's shape, dtype and device.
Any operation on it, by whoever holds it, first makes the gradients whole. While nobody looks
it costs nothing.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch

from wingbeat.engine.gradients.reading import reads_values
from wingbeat.errors import UsageError

if TYPE_CHECKING:
    from wingbeat.engine.gradients.bucket import Slot


_UNSCALE = torch._amp_foreach_non_finite_check_and_unscale_
"""What a GradScaler calls on gradients. Each worker's own blocks suffice for that."""

_GONE = (
    "a gradient was read that no worker has whole any more, after optimizer.step() or "
    'zero_grad(); with a divided optimizer (shard_optimizer, update="server") read '
    "gradients before, or keep a clone()"
)


class Gatherer(Protocol):
    """Who makes gradients whole."""

    def show_gradient(self, slot: Slot) -> None:
        """Make ``slot``'s view whole, because somebody touches what stands for it."""

    def unscale(
        self, grads: list[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor
    ) -> None:
        """Multiply ``grads``, some of them pending, and set ``found_inf`` to 1 if need be."""


class PendingGradient(torch.Tensor):
    """Stands for the gradient in ``slot.view`` until that is whole."""

    _view: torch.Tensor
    _slot: weakref.ref[Slot]
    _gatherer: weakref.ref[Gatherer]
    _dropped: str

    @staticmethod
    def __new__(cls, slot: Slot, gatherer: weakref.ref[Gatherer]) -> PendingGradient:
        """Make one for the place that ``slot`` has in the plan in force."""
        view = slot.view
        made: PendingGradient = torch.Tensor._make_wrapper_subclass(
            cls, view.shape, strides=view.stride(), dtype=view.dtype, device=view.device
        )
        # What p.grad refers to must not refer to p: no garbage collector sees that circle.
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
        """Run ``func`` on the gradients that are meant; what only looks at shapes runs as it is."""
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
        """The same for what is called without Python, as when autograd accumulates."""
        return func(*_whole(args), **_whole(kwargs or {}))

    def slot(self) -> Slot | None:
        """Return the place that this stands for; None if it stands for nothing any more."""
        slot: Slot | None = self.__dict__["_slot"]()
        current = slot is not None and slot.pending is self and not self.__dict__["_dropped"]
        return slot if current else None

    def drop(self, why: str = "") -> None:
        """From now on refuse to be read, for this reason: nobody will have what it stands for."""
        self.__dict__["_dropped"] = why or _GONE

    def whole(self) -> torch.Tensor:
        """Return the whole gradient, which all workers have by then.

        Raises:
            UsageError: it is still being made, or was dropped.
        """
        gatherer = self.__dict__["_gatherer"]()
        slot = self.__dict__["_slot"]()
        view: torch.Tensor = self.__dict__["_view"]
        if self.__dict__["_dropped"]:
            raise UsageError(self.__dict__["_dropped"])
        if gatherer is not None and slot is not None and slot.pending is self:
            gatherer.show_gradient(slot)
            if slot.pending is self:
                slot.bucket.settle()
                if slot.param.grad is slot.shown:
                    view = slot.shown  # its data may be assigned to, unlike the view's
        return view


def _whole(value: Any) -> Any:
    """``value``, which may be nested, with whole gradients in place of pending ones."""
    if isinstance(value, PendingGradient):
        return value.whole()
    if isinstance(value, (list, tuple)):
        items = [_whole(item) for item in value]
        if isinstance(value, list):
            return items
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    return value
