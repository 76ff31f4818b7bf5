"""The outer optimizer: how far workers have come is averaged, and is its gradient (DiLoCo)."""

from __future__ import annotations

import torch

from wingbeat.types import Span
from wingbeat.updates.averager import Averager
from wingbeat.updates.flat import FlatModel
from wingbeat.updates.local import LocalUpdate
from wingbeat.updates.update import Closure, Host, Training


class OuterUpdate(LocalUpdate):
    """Runs local steps, and an outer step of SGD with Nesterov momentum on their average.

    DiLoCo (Douillard et al., 2023), Algorithm 1. With ``g`` the mean over workers of the shared
    model less each one's own: ``m = momentum * m + g``, and the shared model becomes itself less
    ``lr * (g + momentum * m)``, as ``torch.optim.SGD(nesterov=True)`` has it. All workers then
    go on from there. What a worker has moved while a fragment's average was made is kept.

    Args:
        training: what it works on.
        model: its parameters.
        averager: of all workers.
        lr: the outer learning rate.
        momentum: Nesterov's, 0 for none.
    """

    def __init__(
        self,
        training: Training,
        model: FlatModel,
        averager: Averager,
        lr: float,
        momentum: float,
    ) -> None:
        super().__init__(training, model, averager)
        self._lr, self._momentum = lr, momentum
        self._shared = torch.empty_like(model.flat)
        self._velocity = torch.zeros_like(model.flat)

    def step(self, host: Host, closure: Closure) -> object:
        """Run the optimizer's own step, and what the schedule adds."""
        if not self._moved:
            # All workers hold the same: to begin with, and after they have met or loaded.
            self._model.read()
            self._shared.copy_(self._model.flat)
        return super().step(host, closure)

    def _offer(self, first: int, last: int) -> None:
        """Put into the flat model how far this worker is from the shared one."""
        super()._offer(first, last)
        _, flat, shared = self._parts(first, last)
        torch.sub(shared, flat, out=flat)

    def _take(self, first: int, last: int, *, stepped: bool) -> None:
        """Make the outer step, and go on from the shared model."""
        part, flat, shared = self._parts(first, last)
        velocity = self._velocity[part.start : part.stop]
        velocity.mul_(self._momentum).add_(flat)
        shared.sub_(flat.add_(velocity, alpha=self._momentum), alpha=self._lr)
        flat.copy_(shared)
        super()._take(first, last, stepped=stepped)

    def _parts(self, first: int, last: int) -> tuple[Span, torch.Tensor, torch.Tensor]:
        part = self._model.part(first, last)
        inside = slice(part.start, part.stop)
        return part, self._model.flat[inside], self._shared[inside]
