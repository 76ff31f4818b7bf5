"""A world of one worker: nothing to exchange, so nothing is hooked."""

from __future__ import annotations

from typing import Any

from wingbeat.sync.engine import Engine


class SingleEngine(Engine):
    """Leaves forward and backward alone; the added methods work as with many workers."""

    def _build(self, _ready_order: Any) -> None:
        self.buckets = []

    def _attach(self) -> None:
        pass
