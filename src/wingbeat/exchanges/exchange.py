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

        The bucket's ``wire`` is the encoding of its gradients. With ``chained``, a chunk may start
        when the bucket's previous operation has finished with it. A `PeerError` if an earlier
        exchange failed.
        """

    def planned(self, buckets: Sequence[Bucket], forward: Sequence[Bucket]) -> None:
        """Use these buckets from now on; a `UsageError` if the exchange does not support one.

        ``buckets`` are in the order in which their gradients become ready, ``forward`` in the order
        in which forward needs them.
        """

    def sections(self) -> Sequence[Section]:
        """Return the sections of `wingbeat top`. Other threads call this; it must not block."""
