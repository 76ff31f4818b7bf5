"""The order of an accelerator's streams on which gradients reach their buckets.

Autograd makes gradients on the stream of backward, and ``fully_shard`` on a stream of its own, that
of its reduce-scatters. A bucket may have gradients of both.
"""

from __future__ import annotations

from collections import defaultdict

import torch

from wingbeat.engine.gradients.bucket import Bucket


class GradientStreams:
    """Orders the streams that write gradients to buckets, and those that read them.

    No call waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._writers: defaultdict[Bucket, set[torch.Stream]] = defaultdict(set)
        self._known: set[torch.Stream] = set()  # a device has a few streams, which are used again
        self._readers: set[torch.Stream] = set()
        self._opened: torch.Event | None = None

    @property
    def current(self) -> torch.Stream:
        """The stream of the calling thread."""
        return torch.accelerator.current_stream(self._device)

    def publish(self) -> torch.Event:
        """Order all streams that write gradients after what the current stream was given."""
        here = self.current
        event = torch.Event(self._device)
        event.record(here)
        for stream in self._known:
            if stream != here:
                stream.wait_event(event)
        return event

    def begin(self) -> None:
        """Begin a backward, whose buckets were prepared on the current stream."""
        self._writers.clear()
        self._opened = self.publish()

    def enter_forward(self) -> None:
        """Handle a forward on the current stream, on which updates read gradients too."""
        self._readers.add(self.current)

    def record_uses(self, flat: torch.Tensor) -> None:
        """Keep the memory of a buffer that is replaced until all streams have used it."""
        for stream in {self.current, *self._known, *self._readers}:
            flat.record_stream(stream)

    def before_write(self, bucket: Bucket) -> None:
        """Handle that gradients are about to be written to a bucket on the current stream."""
        here = self.current
        if here not in self._known:
            self._known.add(here)
            if self._opened is not None:
                here.wait_event(self._opened)
        self._writers[bucket].add(here)

    def join(self, bucket: Bucket) -> None:
        """Order the current stream after what has been written to a bucket."""
        self._wait_for(self._writers.get(bucket, set()))

    def end(self) -> None:
        """Order the current stream after all that has been written in this backward."""
        self._wait_for(set().union(*self._writers.values()))

    def _wait_for(self, streams: set[torch.Stream]) -> None:
        here = self.current
        for stream in streams:
            if stream != here:
                here.wait_stream(stream)
