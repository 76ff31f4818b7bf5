"""Room in a flat model for what an optimizer remembers of each element of some parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from wingbeat.engine.updates.per_element import ElementState


class _Place(NamedTuple):
    """Where the values of one tensor of the state are."""

    param: torch.Tensor
    name: str
    view: torch.Tensor


class StateRoom:
    """Values of the state, and behind them for each tensor whether it is there: 1, or 0.

    Both are averaged. A mean of values divided by the mean of these ones is the mean over those who
    have the tensor: a worker whose optimizer has not begun with a parameter gives nothing, and
    takes nothing, as nobody can begin half of it.

    Args:
        state: of the optimizer.
        params: whose.
        room: as long as `size` says.
    """

    def __init__(
        self, state: ElementState, params: Sequence[torch.Tensor], room: torch.Tensor
    ) -> None:
        self._state, self._params = state, list(params)
        names = [(param, name) for param in params for name in state.names(param)]
        self._there = room[len(room) - len(names) :]
        self._places: list[_Place] = []
        start = 0
        for param, name in names:
            stop = start + param.numel()
            self._places.append(_Place(param, name, room[start:stop].view(param.shape)))
            start = stop

    @staticmethod
    def size(state: ElementState, params: Sequence[torch.Tensor]) -> int:
        """Return how many elements it has."""
        return sum((param.numel() + 1) * len(state.names(param)) for param in params)

    def read(self) -> None:
        """Put the values into the room.

        Raises:
            UsageError: the optimizer remembers other things than at `distribute`.
        """
        for place, value, there in zip(self._places, self._values(), self._there, strict=True):
            there.fill_(value is not None)
            if value is None:
                place.view.zero_()
            else:
                place.view.copy_(value)

    def write(self) -> None:
        """Take over the mean that is in the room."""
        for mean, value in zip(self._means(), self._values(), strict=True):
            if mean is not None and value is not None:
                value.copy_(mean)

    def add(self, sent: StateRoom) -> None:
        """Take over the mean that is in the room, and keep what has changed since ``sent``.

        What has no negative values, such as the mean of squares, stays above the smaller of the
        mean and what it is: one that has decayed meanwhile might end below zero, and have no root.
        """
        for mean, begun, value in zip(self._means(), sent._means(), self._values(), strict=True):
            if mean is None or begun is None or value is None:
                continue
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
        """What the optimizer has now."""
        found = {param: self._state.values(param) for param in self._params}
        return [found[place.param].get(place.name) for place in self._places]

    def _means(self) -> Iterator[torch.Tensor | None]:
        """Yield what is in the room, of those who have it; None where nobody has."""
        for place, there in zip(self._places, self._there.tolist(), strict=True):
            yield None if there <= 0 else place.view if there == 1 else place.view / there
