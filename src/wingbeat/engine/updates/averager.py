"""Averaging parameters with other workers': the interface between updates and who they meet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from wingbeat.observe.meter import Section
    from wingbeat.types import Span


class Averager(Protocol):
    """Averages one flat buffer with other workers', beside training or in between.

    Attributes:
        buffer: all parameters, flat, contiguous, on the CPU.
    """

    buffer: torch.Tensor

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that were averaged with last, this worker's too."""

    def begin(self, part: Span) -> None:
        """The buffer's ``part`` is this worker's model now; leave it alone until `end`."""

    def end(self) -> None:
        """Wait as long as the exchange asks for; afterwards the part holds the average.

        Raises:
            PeerError: a worker was waited for in vain; names it.
        """

    def taken(self) -> None:
        """The average was taken over: what it lacks on account of a codec is sent the next time."""

    def level(self, part: Span) -> None:
        """Make a part of the whole the mean over all workers, who all call this; same bits."""

    def sections(self) -> Sequence[Section]:
        """Return what is to be seen of it in `wingbeat top`, now; other threads ask."""

    def close(self) -> None:
        """Leave; nobody waits for this worker any more."""
