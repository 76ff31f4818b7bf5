"""The step of a worker that has no others: its gradients travel nowhere."""

from __future__ import annotations

from typing import Any

from wingbeat.engine.gradients.compression import Compression
from wingbeat.engine.updates.update import Closure, Host, Training
from wingbeat.engine.updates.whole import WholeUpdate


class AloneUpdate(WholeUpdate):
    """Steps on gradients that codecs of many workers would leave: with momentum and residuals."""

    def __init__(self, training: Training, compression: Compression) -> None:
        super().__init__(training)
        self._compression = compression

    def step(self, host: Host, closure: Closure) -> Any:
        """Run the optimizer's own step."""
        if closure is None:
            self._complete()
            return super().step(host, None)

        def completed() -> Any:
            loss = closure()
            self._complete()
            return loss

        return super().step(host, completed)

    def _complete(self) -> None:
        if self._compression.changes_alone():
            for slot in self._training.bucketing.slots:
                self._compression.alone(slot)
