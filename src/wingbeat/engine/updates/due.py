"""Updates that are due: as of which step, and which parameters wait for one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

import torch

from wingbeat.engine.gradients.bucket import Bucket
from wingbeat.engine.updates.ambient import Ambient
from wingbeat.engine.updates.stale import StaleParameters
from wingbeat.engine.updates.stepper import GroupSnapshot


class Due:
    """Of one step at a time; the next one begins when nothing is due any more.

    Args:
        refresh: brings parameters up to date that somebody is about to read.

    Attributes:
        snapshot: the optimizer's settings at that step.
    """

    snapshot: GroupSnapshot
    _ambient: Ambient

    def __init__(self, refresh: Callable[[list[torch.Tensor]], None]) -> None:
        self._stale = StaleParameters(refresh)

    def can_wait(self, params: Iterable[torch.Tensor]) -> bool:
        """Whether all these can be marked, so that nobody reads one before its update."""
        return self._stale.can_mark(params)

    def begin(self, snapshot: GroupSnapshot, device: torch.device) -> None:
        """What is added from here on is to be updated as if at this moment."""
        self.snapshot = snapshot
        self._ambient = Ambient(device)

    def add(self, bucket: Bucket, params: Iterable[torch.Tensor]) -> None:
        """These parameters of the bucket are due: have whoever reads one update it."""
        bucket.due = True
        self._stale.mark(params)

    def remove(self, bucket: Bucket) -> None:
        """The bucket's update is being made."""
        bucket.due = False
        self._stale.clear(slot.param for slot in bucket.slots)

    def as_of_step(self) -> contextlib.AbstractContextManager[None]:
        """Restore inside what was around the step: autocast, streams and the like."""
        return self._ambient.restored()
