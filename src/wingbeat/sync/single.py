"""A world of one worker: nothing to exchange, so nothing is hooked."""

from __future__ import annotations

from wingbeat.sync.engine import Engine


class SingleEngine(Engine):
    """Leaves forward and backward alone; the added methods work as with many workers."""

    def _start(self) -> None:
        pass
