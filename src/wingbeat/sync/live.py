"""What a worker that comes back to a job of averaged models takes over from one that is there."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from wingbeat.errors import PeerError
from wingbeat.exchanges.copied import Copy, written
from wingbeat.gradients.bucketing import Bucketing
from wingbeat.observe.log import log
from wingbeat.schedules.local import Local
from wingbeat.transport.text import first_line
from wingbeat.updates.update import Training


class LiveState:
    """A worker's model, the state of its optimizer, and how many steps it has made.

    Where averages are made beside training, it is of no one moment: some parameters may be a step
    further than others, as they are on two workers anyway.

    Args:
        training: whose; its model is not kept alive.
        schedule: counts the steps.
    """

    def __init__(self, training: Training, schedule: Local) -> None:
        self._bucketing = weakref.ref(training.bucketing)
        self._optimizer = weakref.ref(training.optimizer)
        self._schedule = schedule

    def written(self) -> bytes | None:
        """Return all of it as bytes; None if the model is gone, or has what cannot be sent."""
        bucketing, optimizer = self._bucketing(), self._optimizer()
        if bucketing is None or optimizer is None:
            return None
        params = [slot.param for slot in bucketing.slots]
        try:
            return written(_tensors(bucketing), params, optimizer, self._schedule.made)
        except (PeerError, RuntimeError) as error:
            # It concerns only the one that asks; a state that changes meanwhile, too.
            log.warning("%s", first_line(error))
            return None

    def put(self, payload: Any) -> None:
        """Take over what another worker has `written`.

        Raises:
            PeerError: it is none of this model.
        """
        bucketing, optimizer = self._bucketing(), self._optimizer()
        assert bucketing is not None, "who comes back has a model"
        assert optimizer is not None, "who comes back has an optimizer"
        copy = Copy(payload, _tensors(bucketing), [slot.param for slot in bucketing.slots])
        if type(copy.last) is not int or copy.last < 0:
            raise PeerError(
                f"a state has come with {copy.last!r:.40} as the number of steps; check that all "
                "workers run the same script"
            )
        copy.put(optimizer)
        self._schedule.made = copy.last


def _tensors(bucketing: Bucketing) -> list[torch.Tensor]:
    return [*(slot.param.detach() for slot in bucketing.slots), *bucketing.others]
