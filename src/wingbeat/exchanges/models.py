"""Where models are averaged and gradients stay: no operation on buckets, and something to see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from wingbeat.schedules.events import Operation

if TYPE_CHECKING:
    from wingbeat.engine.gradients.bucket import Bucket
    from wingbeat.observe.meter import Section


class ModelExchange:
    """Starts nothing on buckets: the update averages models by itself.

    Args:
        shown: returns what is to be seen of that in `wingbeat top`.
    """

    def __init__(self, shown: Callable[[], Sequence[Section]]) -> None:
        self._shown = shown

    def start(self, operation: Operation, bucket: Bucket, chained: bool = False) -> None:
        """No gradient travels."""
        raise NotImplementedError(f"{operation} of bucket {bucket.index}")

    def planned(self, buckets: Sequence[Bucket], forward: Sequence[Bucket]) -> None:
        """There are no buckets."""
        assert not [*buckets, *forward], "gradients stay where they are"

    def sections(self) -> Sequence[Section]:
        """Return what is to be seen of averages."""
        return self._shown()
