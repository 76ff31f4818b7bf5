"""The interface between schedules and the exchange of buckets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from wingbeat.schedules.events import Operation

if TYPE_CHECKING:
    from wingbeat.engine.gradients.bucket import Bucket
    from wingbeat.observe.meter import Section


class Exchange(Protocol):
    """Starts operations on buckets, in the order of the calls, which is the same on all workers.

    Exchanges with traffic classes also satisfy `wingbeat.planning.controllers.Prioritized`.
    """

    def start(self, operation: Operation, bucket: Bucket, chained: bool = False) -> None:
        """Begin ``operation`` on ``bucket.flat``, in place, and store its handle in the bucket.

        Args:
            operation: what to do.
            bucket: its ``wire`` says what gradients travel as.
            chained: whether chunks may start when the bucket's previous operation has finished
                with them.

        Raises:
            PeerError: an earlier exchange failed, so that the workers are no longer in step.
        """

    def planned(self, buckets: Sequence[Bucket], forward: Sequence[Bucket]) -> None:
        """Use these buckets from now on.

        Args:
            buckets: in the order in which their gradients become ready.
            forward: the same, in the order in which forward needs them.

        Raises:
            UsageError: the exchange cannot carry one of them.
        """

    def sections(self) -> Sequence[Section]:
        """Return the sections of `wingbeat top`; called by other threads, must not block."""
