"""The state that a restarted worker copies from a peer, where models are averaged."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from wingbeat.engine.gradients.bucketing import Bucketing
from wingbeat.engine.updates.local import LocalUpdate
from wingbeat.engine.updates.update import Training
from wingbeat.errors import PeerError
from wingbeat.exchanges.snapshot import Snapshot, encode_snapshot
from wingbeat.observe.log import log
from wingbeat.transport.text import first_line


class LiveState:
    """A worker's model, optimizer state, and update progress, by weak references.

    With averages in the background, some parameters may be a step ahead of others.
    """

    def __init__(self, training: Training, update: LocalUpdate) -> None:
        self._bucketing = weakref.ref(training.bucketing)
        self._optimizer = weakref.ref(training.optimizer)
        self._update = weakref.ref(update)

    def written(self) -> bytes | None:
        """Serialise the state; None if the model no longer exists, or cannot be serialised."""
        bucketing, optimizer, update = self._bucketing(), self._optimizer(), self._update()
        if bucketing is None or optimizer is None or update is None:
            return None
        params = [slot.param for slot in bucketing.slots]
        kept, numbers = update.handed()
        try:
            return encode_snapshot([*_tensors(bucketing), *kept], params, optimizer, numbers)
        except (PeerError, RuntimeError) as error:
            # This affects the requester only, even if the state changes meanwhile.
            log.warning("%s", first_line(error))
            return None

    def put(self, payload: Any) -> None:
        """Continue from a peer's `written` state; raise a `PeerError` if it does not fit."""
        bucketing, optimizer, update = self._bucketing(), self._optimizer(), self._update()
        assert bucketing is not None
        assert optimizer is not None
        assert update is not None
        kept, _ = update.handed()
        params = [slot.param for slot in bucketing.slots]
        snapshot = Snapshot(payload, [*_tensors(bucketing), *kept], params)
        numbers = snapshot.extra
        try:
            if not isinstance(numbers, list) or not all(type(n) is int for n in numbers):
                raise ValueError("no list of numbers")
            snapshot.load_into(optimizer)
            update.take_over(numbers)
        except ValueError as error:
            raise PeerError(
                f"a state has come with {numbers!r:.40} for the steps that were made ({error}); "
                "check that all workers run the same script"
            ) from None


def _tensors(bucketing: Bucketing) -> list[torch.Tensor]:
    return [*(slot.param.detach() for slot in bucketing.slots), *bucketing.others]
