"""A world of one worker: nothing to exchange, so nothing is hooked."""

from __future__ import annotations

from typing import Any

import torch

from wingbeat.sync.engine import Engine


class SingleEngine(Engine):
    """Leaves forward and backward alone; the added methods work as with many workers."""

    def _build(self, _ready_order: Any) -> None:
        self.buckets = []

    def _attach(self) -> None:
        pass

    def step(self, closure: Any = None) -> Any:
        """Run the optimizer's own step."""
        return self.partial.whole_step(closure)

    def discard(self) -> None:
        """Nothing is under way."""

    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip by the norm of this worker's gradients."""
        return torch.nn.utils.clip_grad_norm_(self.partial.params(), max_norm, norm_type)
