"""Steps on a worker's own gradients, and averages of models in between (Ripples, section 3.2)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from wingbeat.schedules.events import Adopt, Average, Step, UpdateCommand
from wingbeat.updates.averager import Averager
from wingbeat.updates.flat import FlatModel
from wingbeat.updates.update import Closure, Host, Training
from wingbeat.updates.whole import WholeUpdate


class LocalUpdate(WholeUpdate):
    """Runs the optimizer's own step, and has parameters averaged with other workers'.

    Only the thread that trains changes parameters, inside of ``step``. What was averaged beside
    training is added as a difference to what was sent, so that no step in between is lost; where
    there was none, the average itself is taken, with the same bits on all who made it.

    Args:
        training: what it works on.
        model: its parameters.
        averager: with whom; its buffer is the model's.

    Attributes:
        waited: told for how many nanoseconds others were waited for.
        left: whether it meets nobody any more.
    """

    def __init__(self, training: Training, model: FlatModel, averager: Averager) -> None:
        super().__init__(training)
        self._model, self._averager = model, averager
        self.waited: Callable[[int], None] = lambda _: None
        self._under_way: tuple[int, int] | None = None
        self._sent: torch.Tensor | None = None
        self._stepped = self._moved = self.left = False

    def step(self, host: Host, closure: Closure) -> Any:
        """Run the optimizer's own step, and what the schedule adds."""
        self._moved = True
        return super().step(host, closure)

    def perform(self, command: UpdateCommand, closure: Closure) -> Any:
        """Do as the schedule says; return what a whole step has returned."""
        if isinstance(command, Average):
            self._begin(command.first, command.last)
        elif isinstance(command, Adopt):
            self._adopt()
        else:
            assert isinstance(command, Step), command
            self._stepped = True
            return super().perform(command, closure)
        return None

    def level(self, *, always: bool) -> bool:
        """Make all models their mean, on every worker the same bits.

        Buffers of floating point, such as BatchNorm's statistics, are averaged with them.

        Raises:
            PeerError: a worker did not do the same; names it.
        """
        meets, self._moved = self._moved or always, False
        if meets:
            self._adopt()
            self._model.read()
            self._wait(self._averager.level)
            self._model.write()
        return False  # nothing is left for others to level

    def detach(self) -> None:
        """Meet nobody any more."""
        self.left = True
        self._averager.close()

    def _begin(self, first: int, last: int) -> None:
        self._offer(first, last)
        self._stepped, self._under_way = False, (first, last)
        self._averager.begin(self._model.part(first, last))

    def _adopt(self) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return
        self._wait(self._averager.end)
        self._take(*under_way, stepped=self._stepped)

    def _wait(self, wait: Callable[[], None]) -> None:
        begin = time.monotonic_ns()
        try:
            wait()
        finally:
            self.waited(time.monotonic_ns() - begin)

    # -- what is averaged, and what becomes of it ---------------------------------------------

    def _offer(self, first: int, last: int) -> None:
        """Put into the flat model what is to be averaged: the parameters."""
        self._model.read(first, last)
        part = self._model.part(first, last)
        self._sent = self._model.flat[part.start : part.stop].clone()

    def _take(self, first: int, last: int, *, stepped: bool) -> None:
        """Take over the average, which is in the flat model.

        Args:
            first: number of the first fragment.
            last: of the one behind the last.
            stepped: whether the optimizer has stepped since parameters were sent.
        """
        sent, self._sent = self._sent, None
        assert sent is not None, "an average is begun before it is taken over"
        if not stepped:
            self._model.write(first, last)
            return
        part = self._model.part(first, last)
        self._model.flat[part.start : part.stop].sub_(sent)
        self._model.add(first, last)
