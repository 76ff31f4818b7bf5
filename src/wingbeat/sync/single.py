"""A world of one worker: nothing to exchange, so nothing is hooked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wingbeat.schedules import Wfbp
from wingbeat.sync.engine import Engine


class SingleEngine(Engine):
    """Leaves forward and backward alone; the added methods work as with many workers."""

    make_schedule = Wfbp

    def _start(self) -> None:
        self.schedule = self.make_schedule()

    def zero_grad(self, set_to_none: bool) -> None:
        """Nothing: all gradients are where their owner sees them."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the optimizer's own step, on gradients that codecs of many workers would leave."""
        if closure is None:
            self._complete()
            return super().step()

        def completed() -> Any:
            loss = closure()
            self._complete()
            return loss

        return super().step(completed)

    def _complete(self) -> None:
        if self.wiring.changes_alone():
            for slot in self.slots:
                self.wiring.alone(slot)
