"""One small all-gather in which all workers say what they are about to do with their gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from wingbeat.collectives import Collectives, Handle
from wingbeat.errors import PeerError
from wingbeat.schedules.intents import Answer, Intent


class Agreement:
    """One small all-gather at a time, of a byte and one bit for each slot from every worker.

    It goes over the links from the host's memory, also where gradients are on a GPU: what comes
    back decides what the host queues next.
    """

    def __init__(self, collectives: Collectives, slots: int) -> None:
        self._collectives = collectives
        self._width = 1 + -(-slots // 8)
        self._rows = torch.zeros(0, dtype=torch.uint8)
        self._handle: Handle | None = None

    def say(self, intent: Intent, used: Iterable[int]) -> None:
        """Tell everyone what this worker does, and which slots it has gradients for."""
        row = bytearray(self._width)
        row[0] = intent
        for index in used:
            row[1 + index // 8] |= 1 << index % 8
        world = self._collectives.world
        self._rows = torch.zeros(world.size, self._width, dtype=torch.uint8)
        self._rows[world.rank] = torch.frombuffer(row, dtype=torch.uint8)
        self._handle = self._collectives.all_gather(self._rows.view(-1), label="intents")

    def hear(self) -> Answer:
        """Wait for what all have said.

        Raises:
            PeerError: a worker said something that has no meaning.
        """
        assert self._handle is not None
        self._handle.wait()
        self._handle = None
        heads = self._rows[:, 0].tolist()
        for rank, head in enumerate(heads):
            if head not in list(Intent):
                raise PeerError(f"rank {rank} sent {head} where an intent was due, 1 to 7")
        union = 0
        for row in self._rows[:, 1:].tolist():
            union |= int.from_bytes(row, "little")
        used = frozenset(i for i, bit in enumerate(reversed(f"{union:b}")) if bit == "1")
        return Answer(tuple(Intent(head) for head in heads), used)
