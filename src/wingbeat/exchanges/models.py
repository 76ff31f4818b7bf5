"""Where models are averaged and gradients stay: no operation on buckets, and something to see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from wingbeat.exchanges.averager import Averager
from wingbeat.schedules.events import Operation
from wingbeat.types import Span

if TYPE_CHECKING:
    from wingbeat.gradients.bucket import Bucket
    from wingbeat.observe.meter import Section


class ModelExchange:
    """Starts nothing on buckets: updates speak with an `Averager` themselves.

    Attributes:
        averager: with whom models are averaged.
        fragments: how many parts of the model take turns.
    """

    def __init__(self, averager: Averager, fragments: int) -> None:
        self.averager, self.fragments = averager, fragments

    def start(self, operation: Operation, bucket: Bucket, chained: bool = False) -> None:
        """No gradient travels."""
        raise NotImplementedError(f"{operation} of bucket {bucket.index}")

    def planned(self, buckets: Sequence[Bucket], forward: Sequence[Bucket]) -> None:
        """There are no buckets."""
        assert not [*buckets, *forward], "gradients stay where they are"

    def prioritise(self, thresholds: Sequence[float]) -> None:
        """There are no classes."""
        raise NotImplementedError(f"no classes that thresholds {thresholds} would divide")

    def owned(self, bucket: Bucket) -> Span:
        """Nothing is left whole on one worker alone."""
        raise NotImplementedError(f"no worker owns a part of bucket {bucket.index}")

    def sections(self) -> Sequence[Section]:
        """Return what the averager has to show."""
        return self.averager.sections()
