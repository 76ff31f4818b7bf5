"""What an operation on a bucket means: the interface between schedules and collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from wingbeat.schedules.events import Operation

if TYPE_CHECKING:
    from wingbeat.engine.gradients.bucket import Bucket
    from wingbeat.observe.meter import Section
    from wingbeat.types import Span


class Exchange(Protocol):
    """Starts operations on buckets, in the order of the calls, which is the same on all workers."""

    def start(self, operation: Operation, bucket: Bucket, chained: bool = False) -> None:
        """Begin ``operation`` on ``bucket.flat``, in place, and keep its handle there.

        Args:
            operation: what to do.
            bucket: its ``wire`` says what gradients travel as.
            chained: whether chunks may go on as the bucket's operation before is done with them.

        Raises:
            PeerError: an earlier exchange failed, so that the workers are no longer in step.
        """

    def planned(self, buckets: Sequence[Bucket], forward: Sequence[Bucket]) -> None:
        """From now on there are these buckets; ``forward``: in the order in which it needs them.

        Raises:
            UsageError: the exchange cannot carry one of them.
        """

    def prioritise(self, thresholds: Sequence[float]) -> None:
        """Divide the classes of flows by other levels of urgency from now on.

        Raises:
            NotImplementedError: it has no classes.
        """

    def owned(self, bucket: Bucket) -> Span:
        """Return the elements of ``bucket.flat`` that a reduce-scatter leaves whole here."""

    def sections(self) -> Sequence[Section]:
        """Return what is to be seen of it in `wingbeat top`, now; other threads ask.

        It must not wait, nor take a lock.
        """
