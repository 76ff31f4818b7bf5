"""A model's parameters, and its optimizer's state, in one flat buffer that workers average."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from wingbeat.collectives.pinned import HostMirror, pinned_zeros
from wingbeat.engine.gradients.bucket import checksum, dtype_name
from wingbeat.engine.gradients.placed import local
from wingbeat.engine.updates.trials import (
    TrialFailed,
    bare_step,
    make_shadow,
    preserve_rng_state,
    settings_of,
    try_step,
)
from wingbeat.errors import UsageError
from wingbeat.transport.text import first_line
from wingbeat.types import Span

Tensors = list[torch.Tensor]

_BITS = 32
"""Bits of a checksum; the mean of each is 0 or 1 only if all workers have the same bit."""

_ROUNDED = 1e-4
"""The rounding error of a mean of equal bits. With up to 5,000 workers, the mean of unequal bits
differs more from 0 and 1.
"""

OPTION = "average_state=True"
"""The user's option that averages the optimizer's state."""

_TRIAL_STEPS = 2
_SIZES = (3, 5, 7, 2)
"""Sizes of test tensors in each dimension, unlike any other shape."""

_SIMPLE = (bool, int, float, str, type(None))

Names = Mapping[str, torch.dtype]
"""Names of state with one value per element, and its dtype."""


# -- the optimizer's state ----------------------------------------------------------------


class ElementState:
    """The optimizer's state that has one value per element of a parameter.

    Adam's moments and a momentum can be averaged like parameters; a step counter cannot. A shadow
    of the optimizer makes some steps on small tensors, so that any optimizer can be classified.

    Raises:
        UsageError: its state cannot be averaged, or the trial failed; states why.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> None:
        self._optimizer, self._names = optimizer, names
        if isinstance(optimizer, torch.optim.LBFGS):
            raise _refusal(optimizer, "it keeps lists of earlier gradients")
        tried: dict[Any, Names] = {}
        self._known: dict[torch.Tensor, Names] = {}
        for group in optimizer.param_groups:
            settings, settings_key = settings_of(group)
            for param in (param for param in group["params"] if param in names):
                key = (max(param.ndim, 1), param.dtype, param.device, settings_key)
                if key not in tried:
                    tried[key] = _try_state(optimizer, settings, *key[:3])
                self._known[param] = tried[key]
        for param in self._known:
            self.values(param)

    def names(self, param: torch.Tensor) -> Names:
        """Return the names of state per element of ``param``; empty for another optimizer's."""
        return self._known.get(param, {})

    def values(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the values, some missing before the first step; a `UsageError` for new kinds."""
        known = self._known.get(param)
        state = {} if known is None else self._optimizer.__dict__["state"].get(param, {})
        found = {}
        for key, value in state.items():
            why = ""
            if known and key in known and value is not None:
                part = local(value)
                why = _no_average(part, local(param).shape)
                found[key] = part
            elif _per_element(value):
                why = "present, and was absent in the trial"
            if why:
                raise UsageError(
                    f"{OPTION}: the optimizer's state {key!r} of parameter {self._names[param]!r} "
                    f"is {why}: keep the optimizer's options as they are at distribute(), or leave "
                    "average_state out"
                )
        return found

    def described(self) -> list[list[str]]:
        """Return each parameter's state as text, to compare between workers."""
        return [
            [
                name,
                ", ".join(f"{k} ({dtype_name(v)})" for k, v in sorted(self.names(param).items())),
            ]
            for param, name in self._names.items()
        ]


def _try_state(
    optimizer: torch.optim.Optimizer,
    settings: dict[str, Any],
    dimensions: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Names:
    """Return the state per element after some steps on a tensor of ``dimensions`` dimensions."""
    shape = tuple(_SIZES[place % len(_SIZES)] for place in range(dimensions))
    shadow = make_shadow(optimizer)
    param = torch.nn.Parameter(_draw(0, shape, dtype).to(device))
    first = param.detach().clone()
    try:
        with preserve_rng_state(device):
            for number in range(1, _TRIAL_STEPS + 1):
                param.grad = _draw(number, shape, dtype).to(device)
                try_step(shadow, bare_step(type(optimizer).step), settings, [param])
    except TrialFailed as error:
        raise _refusal(optimizer, str(error)) from None
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise _refusal(optimizer, f"it cannot be tried on a small tensor: {reason}") from None
    if torch.equal(param, first):
        raise _refusal(optimizer, "it does not update the parameters of its param groups by itself")
    if any(key is not param for key in shadow.state):
        raise _refusal(optimizer, "it has state that belongs to no parameter")
    each = {}
    for key, value in shadow.state.get(param, {}).items():
        if _per_element(value):
            why = _no_average(value, param.shape)
            if why:
                raise _refusal(optimizer, f"its state {key!r} is {why}")
            each[key] = value.dtype
    return each


def _per_element(value: Any) -> bool:
    """Whether it is more than one number or string."""
    if isinstance(value, torch.Tensor):
        return value.numel() > 1 or type(value) is not torch.Tensor
    return not (
        type(value) in _SIMPLE
        or (type(value) is tuple and all(type(item) in _SIMPLE for item in value))
    )


def _no_average(value: Any, shape: Sequence[int]) -> str:
    """Return why values cannot be averaged between workers; empty if they can."""
    if type(value) is not torch.Tensor:
        return f"a {type(value).__name__}"
    if tuple(value.shape) != tuple(shape):
        return f"of shape {tuple(value.shape)} where the parameter's is {tuple(shape)}"
    if not value.is_floating_point() or value.dtype.itemsize < 2:
        return f"{dtype_name(value.dtype)}, and no plain floating-point numbers"
    return ""


def _draw(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu").to(dtype)


def _refusal(optimizer: torch.optim.Optimizer, why: str) -> UsageError:
    return UsageError(
        f"{OPTION}: the state of {type(optimizer).__name__} cannot be averaged: {why}; leave "
        "average_state out, or take an optimizer whose state is shaped as its parameters, such as "
        "SGD or AdamW"
    )


class _Place(NamedTuple):
    param: torch.Tensor
    name: str
    view: torch.Tensor


class StateBuffer:
    """A part of the flat buffer with state of some parameters, followed by one flag per tensor.

    A flag is 1 if the worker's optimizer has the tensor, else 0. Both are averaged: the mean of
    values divided by the mean of flags is the mean over the workers that have the tensor. A worker
    whose optimizer has made no step on a parameter contributes and receives nothing.
    """

    def __init__(
        self,
        state: ElementState,
        params: Sequence[torch.Tensor],
        flat: torch.Tensor,
        mirror: HostMirror | None = None,
    ) -> None:
        self._state, self._params, self._mirror = state, list(params), mirror or HostMirror()
        names = [(param, name) for param in params for name in state.names(param)]
        values = flat[: len(flat) - len(names)]
        self._flags = flat[len(values) :]
        views = _views(values, [param for param, _ in names])
        self._places = [_Place(*each, view) for each, view in zip(names, views, strict=True)]

    @staticmethod
    def size(state: ElementState, params: Sequence[torch.Tensor]) -> int:
        """Return the number of elements."""
        return sum((local(param).numel() + 1) * len(state.names(param)) for param in params)

    def read(self) -> None:
        """Copy the optimizer's values into the buffer; raises as `ElementState.values`."""
        views, found = [], []
        for place, value, flag in zip(self._places, self._values(), self._flags, strict=True):
            flag.fill_(value is not None)
            if value is None:
                place.view.zero_()
            else:
                views.append(place.view)
                found.append(value)
        self._mirror.read(views, found)

    def write(self) -> None:
        """Copy the means in the buffer to the optimizer."""
        both = zip(self._means(), self._values(), strict=True)
        known = [(m, v) for m, v in both if m is not None and v is not None]
        self._mirror.write([value for _, value in known], [mean for mean, _ in known])

    def add(self, sent: StateBuffer) -> None:
        """Copy the means to the optimizer, and keep changes made since ``sent`` was read.

        Non-negative values, such as a mean of squares, stay above the smaller of the mean and the
        current value: one that has decayed meanwhile could become negative.
        """
        for mean, begun, value in zip(self._means(), sent._means(), self._values(), strict=True):
            if mean is None or begun is None or value is None:
                continue
            mean, begun = mean.to(value.device), begun.to(value.device)
            now = value.to(mean.dtype)
            if torch.equal(now, begun.to(value.dtype).to(mean.dtype)):
                value.copy_(mean)
                continue
            least = torch.minimum(now, mean)
            moved = now + (mean - begun)
            if bool((least >= 0).all() and (begun >= 0).all()):
                moved = torch.maximum(moved, least)
            value.copy_(moved)

    def _values(self) -> list[torch.Tensor | None]:
        found = {param: self._state.values(param) for param in self._params}
        return [found[place.param].get(place.name) for place in self._places]

    def _means(self) -> Iterator[torch.Tensor | None]:
        """Yield the means over the workers that have each tensor; None where no worker has it."""
        for place, flag in zip(self._places, self._flags.tolist(), strict=True):
            yield None if flag <= 0 else place.view if flag == 1 else place.view / flag


# -- the model ----------------------------------------------------------------------------


def buffer_dtype(tensors: Iterable[torch.Tensor]) -> torch.dtype:
    """Return float64 if any tensor has that dtype, else float32."""
    double = any(tensor.dtype is torch.float64 for tensor in tensors)
    return torch.float64 if double else torch.float32


def is_narrow(params: Iterable[torch.Tensor], dtype: torch.dtype) -> bool:
    """Whether a parameter has fewer bits than ``dtype``."""
    return any(param.dtype.itemsize < dtype.itemsize for param in params)


class FlatModel:
    """A buffer for all parameters, then model buffers, in float32 (float64 if any is that).

    Values are copied, so parameters may have any strides and ``data``. Of a `DTensor` it has the
    part that this rank holds. Each fragment's parameters
    are followed by their optimizer state, if that is averaged. Then come numbers that are averaged
    with the whole.

    Frozen parameters are last. Most are large, and equal on all workers; they differ if each worker
    has moved a teacher towards its own model. So the bits of their checksum are averaged with the
    rest, and the parameters only if these show a difference.

    Attributes:
        flat: the buffer, on the host; in pinned memory for parameters on accelerators, unless there
            are frozen ones.
        spans: of each fragment.
        trained: span of all fragments.
        shared: span of all but the frozen parameters, which is averaged over all workers.
        buffers: span of the model's buffers.
        frozen: span of the frozen parameters.
        number: one element.
        extra: further elements, initially zero.
        copies: further tensors as long as `trained`, initially zero.
        narrow: whether a parameter has fewer bits than the buffer.
        with_state: whether it includes the optimizer's state.
    """

    def __init__(
        self,
        fragments: Sequence[Sequence[torch.Tensor]],
        buffers: Callable[[], Tensors] = list,
        copies: int = 0,
        state: ElementState | None = None,
        frozen: Sequence[torch.Tensor] = (),
        extra: int = 0,
    ) -> None:
        self._fragments, self._buffers = [list(part) for part in fragments], buffers
        self._state, self._frozen = state, list(frozen)
        self.with_state = state is not None
        params = [param for part in self._fragments for param in part]
        dtype = buffer_dtype([*params, *buffers(), *frozen])
        sizes = [0] * len(self._fragments)
        if state is not None:
            assert not copies
            kinds = {kind for param in params for kind in state.names(param).values()}
            dtype = torch.float64 if torch.float64 in kinds else dtype
            sizes = [StateBuffer.size(state, part) for part in self._fragments]
        trained = _numel(params) + sum(sizes)
        numel = trained + sum(tensor.numel() for tensor in buffers())
        end = numel + copies * trained + extra + 1
        bits = _BITS if self._frozen else 0
        self.shared, self.buffers = Span(0, end + bits), Span(trained, numel)
        self.frozen = Span(end + bits, end + bits + _numel(frozen))
        self._mirror = HostMirror()
        if self._frozen or all(param.device.type == "cpu" for param in params):
            # Pages that are never written take no memory; pinned ones would.
            zeros = np.zeros(self.frozen.stop, np.float64 if dtype is torch.float64 else np.float32)
            self.flat = torch.from_numpy(zeros)
        else:
            self.flat = pinned_zeros(self.frozen.stop, dtype)
        self.number, self._checksum = self.flat[end - 1 : end], self.flat[end : end + bits]
        self.extra = self.flat[end - 1 - extra : end - 1]
        begins = (numel + copy * trained for copy in range(copies))
        self.copies = [self.flat[begin : begin + trained] for begin in begins]
        self.narrow = is_narrow(params, dtype)
        # Each fragment is followed by its state; the model's buffers follow the last.
        self._views: list[Tensors] = []
        self._state_buffers: list[StateBuffer] = []
        self.spans: list[Span] = []
        start = 0
        for part, size in zip(self._fragments, sizes, strict=True):
            begin, start = start, start + _numel(part)
            self._views.append(_views(self.flat[begin:start], part))
            if state is not None:
                self._state_buffers.append(
                    StateBuffer(state, part, self.flat[start : start + size], self._mirror)
                )
            start += size
            self.spans.append(Span(begin, start))
        self._views.append(_views(self.flat[start:numel], buffers()))
        self._frozen_views = _views(self.flat[self.frozen.start :], self._frozen)
        self.trained = self.part(0, len(self.spans))

    def part(self, first: int, last: int) -> Span:
        """Return the span of the fragments ``first`` to ``last - 1``."""
        return Span(self.spans[first].start, self.spans[last - 1].stop)

    @torch.no_grad()
    def read(self, first: int = 0, last: int | None = None) -> None:
        """Copy fragments into the buffer; by default all, and the model's buffers."""
        for views, tensors in self._pairs(first, last):
            self._mirror.read(views, tensors)
        for state in self._state_buffers[first:last]:
            state.read()

    def read_checksum(self) -> None:
        """Write the bits of a checksum of the frozen parameters."""
        found = 0
        for param in self._frozen:
            found = checksum(local(param), found)
        self._checksum.copy_(
            torch.tensor([found >> bit & 1 for bit in range(len(self._checksum))], device="cpu")
        )

    @property
    def frozen_differ(self) -> bool:
        """Whether the mean of the checksums' bits shows that workers' frozen parameters differ."""
        return bool(((self._checksum - self._checksum.round()).abs() > _ROUNDED).any())

    @torch.no_grad()
    def read_frozen(self) -> None:
        """Copy frozen parameters into the buffer."""
        self._mirror.read(self._frozen_views, _parts(self._frozen))

    @torch.no_grad()
    def write_frozen(self) -> None:
        """Copy the buffer to the frozen parameters."""
        self._mirror.write(_parts(self._frozen), self._frozen_views)

    @torch.no_grad()
    def write(self, first: int = 0, last: int | None = None) -> None:
        """Copy the buffer to fragments; by default to all, and to the model's buffers."""
        for views, tensors in self._pairs(first, last):
            self._mirror.write(tensors, views)

    @torch.no_grad()
    def add(self, first: int, last: int) -> None:
        """Add the buffer's values to the fragments."""
        for views, tensors in self._pairs(first, last):
            torch._foreach_add_(tensors, self._mirror.moved(views, tensors))

    @torch.no_grad()
    def write_state(
        self, first: int = 0, last: int | None = None, sent: torch.Tensor | None = None
    ) -> None:
        """Copy averaged state, if any, to the optimizer; keep changes made since ``sent``."""
        begin = self.spans[first].start
        for number, state in list(enumerate(self._state_buffers))[first:last]:
            if sent is None:
                state.write()
                continue
            assert self._state is not None
            part, span = self._fragments[number], self.spans[number]
            start = span.start + _numel(part)
            state.add(StateBuffer(self._state, part, sent[start - begin : span.stop - begin]))

    def split(self, values: torch.Tensor) -> Tensors:
        """Split a tensor as long as `trained` into one for each parameter, or its local part."""
        return _views(values, [param for part in self._fragments for param in part])

    @torch.no_grad()
    def holds(self, values: torch.Tensor, first: int, last: int) -> bool:
        """Whether the fragments' values equal ``values``, which is as long as their span."""
        begin = self.spans[first].start
        for number in range(first, last):
            params = self._fragments[number]
            start = self.spans[number].start - begin
            others = _views(values[start : start + _numel(params)], params)
            parts = _parts(params)
            for part, other in zip(parts, self._mirror.moved(others, parts), strict=True):
                if not torch.equal(part, other.to(part.dtype)):
                    return False
        return True

    def _pairs(self, first: int, last: int | None) -> Iterator[tuple[Tensors, Tensors]]:
        for number, views in list(enumerate(self._views))[first:last]:
            if number < len(self._fragments):
                yield views, _parts(self._fragments[number])
            elif views:
                tensors = self._buffers()
                if [tensor.shape for tensor in tensors] != [view.shape for view in views]:
                    raise UsageError(
                        "the model's buffers have other shapes than at distribute(), and cannot be "
                        "averaged: call wingbeat.release(model, optimizer) before they change, and "
                        "distribute() again"
                    )
                yield views, tensors


def _parts(tensors: Iterable[torch.Tensor]) -> Tensors:
    """Return what this rank holds of each tensor."""
    return [local(tensor).detach() for tensor in tensors]


def _numel(tensors: Iterable[torch.Tensor]) -> int:
    return sum(part.numel() for part in _parts(tensors))


def _views(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> Tensors:
    """Return the consecutive parts of a flat tensor, in the shapes of what this rank holds."""
    shapes = [part.shape for part in _parts(tensors)]
    parts = flat.split([shape.numel() for shape in shapes]) if shapes else ()
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
