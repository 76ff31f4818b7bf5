"""What parts of a flat model travel as, and what that loses: counted once, whatever fails."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from wingbeat.collectives import Encoded, WireFormat
from wingbeat.types import Span

if TYPE_CHECKING:
    from wingbeat.codecs import Coding


class Lossy:
    """How parts of a flat model travel in averages, each of which may fail and be made again.

    A part is encoded with a copy of its residual. That of an average that was made takes the place
    of the residual when the average is taken over, and not before: what is saved meanwhile is as
    if the average had not begun. Where models travel it does so at once, as averages with several
    groups may follow each other.

    Args:
        wire: what all parts travel as; None: as they are. Or how they are encoded.
        residual: what codecs have lost so far, float32, as long as the model; None where nothing is
            kept.
        gathers: whether everybody gets everybody's payload, in place of their sum.
        models: whether models travel, and not differences: what was lost is a part of this one.
    """

    def __init__(
        self,
        wire: torch.dtype | Coding | None,
        residual: torch.Tensor | None = None,
        *,
        gathers: bool = False,
        models: bool = False,
    ) -> None:
        self.gathers, self._models = gathers, models
        self._wire, self._residual = wire, residual
        self._left = None if residual is None else torch.zeros_like(residual)
        self._made: slice | None = None

    @property
    def dtype(self) -> torch.dtype | None:
        """What all parts travel as, where that is a mere dtype."""
        return self._wire if isinstance(self._wire, torch.dtype) else None

    def begin(self, part: Span) -> WireFormat | None:
        """Return what ``part`` is to travel as, in an average that begins now."""
        self._made = None
        if self._wire is None or isinstance(self._wire, torch.dtype):
            return self._wire
        coding, inside = self._wire.cut(part), slice(part.start, part.stop)
        if self._residual is None or self._left is None:
            return Encoded(coding)
        left = self._left[inside].copy_(self._residual[inside])
        return Encoded(coding, left)

    def settle(self, model: torch.Tensor) -> None:
        """Give a model back what it has lost so far, before all make theirs the mean."""
        if self._models and self._residual is not None:
            model[: self._residual.numel()].add_(self._residual)
            self._residual.zero_()

    def made(self, part: Span) -> None:
        """The average of ``part`` was made."""
        self._made = slice(part.start, part.stop)
        if self._models:  # there may be another group's before a model takes them over
            self.taken()

    def taken(self) -> None:
        """The last average was taken over, if it was made at all."""
        inside, self._made = self._made, None
        if inside is not None and self._residual is not None and self._left is not None:
            self._residual[inside] = self._left[inside]
