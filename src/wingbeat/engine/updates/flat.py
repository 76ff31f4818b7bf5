"""A model's parameters in one flat buffer, cut into fragments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch

from wingbeat.engine.updates.alike import checksum
from wingbeat.engine.updates.per_element import ElementState
from wingbeat.engine.updates.state_room import StateRoom
from wingbeat.errors import UsageError
from wingbeat.types import Span

Tensors = list[torch.Tensor]

_BITS = 32
"""Of a checksum; each is a number whose mean is 0 or 1 only where all workers have the same."""

_ROUNDED = 1e-4
"""How far a mean of equal bits may be from them. Others, of up to 5,000 workers, are further."""


def room_dtype(tensors: Iterable[torch.Tensor]) -> torch.dtype:
    """Return what holds the values of all of them: float32, or float64 if any is that."""
    double = any(tensor.dtype is torch.float64 for tensor in tensors)
    return torch.float64 if double else torch.float32


def is_narrow(params: Iterable[torch.Tensor], dtype: torch.dtype) -> bool:
    """Whether one of them has not all bits of ``dtype``."""
    return any(param.dtype.itemsize < dtype.itemsize for param in params)


class FlatModel:
    """Room for all parameters, and for buffers behind them, in float32 (float64 if any is that).

    Values are copied in and out: whatever a parameter's strides and ``data`` are by then.
    Behind a fragment's parameters comes what the optimizer remembers of them, where that is
    averaged as well. Then comes a number that workers who average all of it agree on so.

    Frozen parameters come last, and are averaged only where workers hold others, as after each has
    moved a teacher towards its own model: most are large, and change on no worker. Whether they do
    is seen by the bits of a checksum, which is averaged with all the rest.

    Args:
        fragments: parameters that are averaged at the same time, in the order of their turns.
        buffers: returns tensors that are averaged only when all workers meet: each time as many, of
            the same shapes, of floating point.
        copies: how many tensors as long as all parameters are behind them, for whoever has values
            of each parameter that are averaged when all workers meet.
        state: the optimizer's, where it is averaged; there are no copies then.
        frozen: parameters that need no gradient, of floating point.

    Attributes:
        flat: the room, on the CPU; its values are whatever was put there last.
        spans: of each fragment.
        trained: of all fragments.
        shared: of what is averaged when all workers meet: all but the frozen parameters.
        frozen: of these.
        number: one element.
        copies: as many tensors as was said, zeros to begin with.
        narrow: whether a parameter has not all bits that the room has.
    """

    def __init__(
        self,
        fragments: Sequence[Sequence[torch.Tensor]],
        buffers: Callable[[], Tensors] = list,
        copies: int = 0,
        state: ElementState | None = None,
        frozen: Sequence[torch.Tensor] = (),
    ) -> None:
        self._fragments, self._buffers = [list(part) for part in fragments], buffers
        self._state, self._still = state, list(frozen)
        params = [param for part in self._fragments for param in part]
        dtype = room_dtype([*params, *buffers(), *frozen])
        sizes = [0] * len(self._fragments)
        if state is not None:
            assert not copies, "an outer optimizer has no average of the inner one's state"
            kinds = {kind for param in params for kind in state.names(param).values()}
            dtype = torch.float64 if torch.float64 in kinds else dtype
            sizes = [StateRoom.size(state, part) for part in self._fragments]
        trained = sum(param.numel() for param in params) + sum(sizes)
        numel = trained + sum(tensor.numel() for tensor in buffers())
        end = numel + copies * trained + 1
        bits = _BITS if self._still else 0
        self.shared = Span(0, end + bits)
        self.frozen = Span(end + bits, end + bits + sum(param.numel() for param in frozen))
        # Pages that nobody ever writes to take no memory.
        room = np.zeros(self.frozen.stop, np.float64 if dtype is torch.float64 else np.float32)
        self.flat = torch.from_numpy(room)
        self.number, self._checksum = self.flat[end - 1 : end], self.flat[end : end + bits]
        begins = (numel + copy * trained for copy in range(copies))
        self.copies = [self.flat[begin : begin + trained] for begin in begins]
        self.narrow = is_narrow(params, dtype)
        self._views: list[Tensors] = []
        self._rooms: list[StateRoom] = []
        self.spans = self._lay_out(sizes)
        self.trained = self.part(0, len(self.spans))

    def _lay_out(self, sizes: Sequence[int]) -> list[Span]:
        """Give each fragment its views, and ``sizes`` of room behind them; then the buffers."""
        spans, start = [], 0
        for part, size in zip(self._fragments, sizes, strict=True):
            begin, start = start, self._add_views(part, start)
            if self._state is not None:
                room = self.flat[start : start + size]
                self._rooms.append(StateRoom(self._state, part, room))
            start += size
            spans.append(Span(begin, start))
        self._add_views(self._buffers(), start)
        values, numels = self.flat[self.frozen.start :], [p.numel() for p in self._still]
        pairs = zip(values.split(numels), self._still, strict=True) if numels else ()
        self._still_views = [view.view(param.shape) for view, param in pairs]
        return spans

    def _add_views(self, tensors: Sequence[torch.Tensor], start: int) -> int:
        """Add a view for each tensor, from ``start`` on; return where they end."""
        views = []
        for tensor in tensors:
            stop = start + tensor.numel()
            views.append(self.flat[start:stop].view(tensor.shape))
            start = stop
        self._views.append(views)
        return start

    @property
    def with_state(self) -> bool:
        """Whether it has the optimizer's state, too."""
        return self._state is not None

    def part(self, first: int, last: int) -> Span:
        """Return where the fragments from ``first`` to before ``last`` are."""
        return Span(self.spans[first].start, self.spans[last - 1].stop)

    @torch.no_grad()
    def read(self, first: int = 0, last: int | None = None) -> None:
        """Put the values of fragments into the room; of all, and of buffers, by default."""
        for views, tensors in self._pairs(first, last):
            torch._foreach_copy_(views, tensors)
        for room in self._rooms[first:last]:
            room.read()

    def read_checksum(self) -> None:
        """Put the bits of a checksum of the frozen parameters into the room."""
        found = 0
        for param in self._still:
            found = checksum(param, found)
        self._checksum.copy_(torch.tensor([found >> bit & 1 for bit in range(len(self._checksum))]))

    @property
    def frozen_differ(self) -> bool:
        """Whether the mean of checksums, which is in the room, says that workers' differ."""
        return bool(((self._checksum - self._checksum.round()).abs() > _ROUNDED).any())

    @torch.no_grad()
    def read_frozen(self) -> None:
        """Put the values of frozen parameters into the room."""
        torch._foreach_copy_(self._still_views, [param.detach() for param in self._still])

    @torch.no_grad()
    def write_frozen(self) -> None:
        """Give frozen parameters the values in the room."""
        torch._foreach_copy_([param.detach() for param in self._still], self._still_views)

    @torch.no_grad()
    def write(self, first: int = 0, last: int | None = None) -> None:
        """Give fragments the values in the room; all, and buffers, by default."""
        for views, tensors in self._pairs(first, last):
            torch._foreach_copy_(tensors, views)

    @torch.no_grad()
    def add(self, first: int, last: int) -> None:
        """Add what is in the room to the fragments' values."""
        for views, tensors in self._pairs(first, last):
            torch._foreach_add_(tensors, views)

    @torch.no_grad()
    def write_state(
        self, first: int = 0, last: int | None = None, sent: torch.Tensor | None = None
    ) -> None:
        """Give the optimizer the state in the room, where it is averaged.

        Args:
            first: the first fragment whose.
            last: the one behind the last; None for all.
            sent: what was in their part when it was sent; what has changed since is kept.
        """
        begin = self.spans[first].start
        for number, room in list(enumerate(self._rooms))[first:last]:
            if sent is None:
                room.write()
                continue
            assert self._state is not None, "there is room for it"
            part, span = self._fragments[number], self.spans[number]
            start = span.start + sum(param.numel() for param in part)
            room.add(StateRoom(self._state, part, sent[start - begin : span.stop - begin]))

    def split(self, values: torch.Tensor) -> Tensors:
        """Return each parameter's part of a tensor as long as `trained`, in its shape."""
        params = [param for part in self._fragments for param in part]
        parts = values.split([param.numel() for param in params])
        return [part.view(param.shape) for part, param in zip(parts, params, strict=True)]

    @torch.no_grad()
    def holds(self, values: torch.Tensor, first: int, last: int) -> bool:
        """Whether the fragments' values are these, which are as long as their part."""
        begin = self.spans[first].start
        for number in range(first, last):
            start = self.spans[number].start - begin
            for param in self._fragments[number]:
                stop = start + param.numel()
                other = values[start:stop].view(param.shape).to(param.dtype)
                if not torch.equal(param.detach(), other):
                    return False
                start = stop
        return True

    def _pairs(self, first: int, last: int | None) -> Iterator[tuple[Tensors, Tensors]]:
        for number, views in list(enumerate(self._views))[first:last]:
            if number < len(self._fragments):
                yield views, [param.detach() for param in self._fragments[number]]
            elif views:
                yield views, self._checked(views)

    def _checked(self, views: Tensors) -> Tensors:
        """Return the buffers.

        Raises:
            UsageError: they are others than when training began.
        """
        tensors = self._buffers()
        if [tensor.shape for tensor in tensors] != [view.shape for view in views]:
            raise UsageError(
                "the model's buffers have other shapes than at distribute(), and cannot be "
                "averaged: call wingbeat.release(model, optimizer) before they change, and "
                "distribute() again"
            )
        return tensors
