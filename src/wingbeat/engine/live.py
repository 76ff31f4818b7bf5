"""The state that a restarted worker copies from another one, where models are averaged."""

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
    """A worker's model, the state of its optimizer, and the progress of its update.

    Where averages are made in the background, it is not of one moment: some parameters may be a
    step ahead of others, as between two workers.

    Args:
        training: its model is not kept alive.
        update: not kept alive.
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
            # Only the requester is concerned, also if the state changes meanwhile.
            log.warning("%s", first_line(error))
            return None

    def put(self, payload: Any) -> None:
        """Load the state that another worker has `written`, and continue like it.

        Raises:
            PeerError: it is of another model; or the others went on without this worker.
        """
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
