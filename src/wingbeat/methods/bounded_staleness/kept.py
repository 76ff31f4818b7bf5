"""A worker's own contributions, until they are in its parameters: an owner may die with them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any


class Kept:
    """Payloads by colayer and iteration.

    Args:
        colayers: k.
    """

    def __init__(self, colayers: int) -> None:
        self._kept: list[deque[tuple[int, Sequence[Any]]]] = [deque() for _ in range(colayers)]

    def __len__(self) -> int:
        return sum(map(len, self._kept))

    def add(self, colayer: int, iteration: int, payloads: Sequence[Any]) -> None:
        """Keep the pieces of a colayer."""
        self._kept[colayer].append((iteration, payloads))

    def of(self, piece: int, marks: Sequence[int]) -> Iterator[tuple[int, int, Any]]:
        """Yield colayer, iteration and payload of what has not been counted, oldest first.

        Args:
            piece: the piece.
            marks: by colayer, the last iteration that was counted.
        """
        for colayer, kept in enumerate(self._kept):
            for iteration, payloads in kept:
                if iteration > marks[colayer]:
                    yield colayer, iteration, payloads[piece]

    def release(self, counted: Callable[[int], int]) -> None:
        """Forget what is in the parameters.

        Args:
            counted: colayer to the last iteration of which all pieces are.
        """
        for colayer, kept in enumerate(self._kept):
            while kept and kept[0][0] <= counted(colayer):
                kept.popleft()
