"""A stream that keeps what is sent, and can be closed."""

from __future__ import annotations

from typing import Any

from wingbeat.methods.bounded_staleness.streams import Streams


class OneStream(Streams):
    """Keeps kinds and parts, those for all workers in one list.

    Args:
        largest: bytes of a part.
        room: parts that are taken until it is opened again.
    """

    largest = 0  # type: ignore[assignment]

    def __init__(self, largest: int, room: int = 1 << 30) -> None:
        self.largest, self.room = largest, room
        self.parts: list[tuple[int, bytes]] = []

    def incarnation(self, worker: int) -> int:
        return 0

    def send(self, worker: int, kind: int, payload: Any) -> bool:
        if not self.room:
            return False
        self.room -= 1
        self.parts.append((kind, bytes(payload)))
        return True
