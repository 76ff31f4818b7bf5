"""What every worker does with its gradients after a backward, said once by each to all.

With a sharded optimizer an all-gather carries either gradients, because somebody looks at them,
or parameters, after a step. Which of the two is not the plan's to say but the user's, and some
only look at gradients on one rank. So before either is queued, every worker tells in a few bytes
what it is about to do, and which parameters it has a gradient for.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from wingbeat.collectives import Collectives, Handle
from wingbeat.errors import PeerError, UsageError


class Intent(enum.IntEnum):
    """What a worker is about to do with the gradients of the last backward."""

    LOOK = enum.auto()
    """Look at them; the other workers need not."""
    CLIP = enum.auto()
    SCALE = enum.auto()
    STEP = enum.auto()
    ADD = enum.auto()
    """Run another backward that adds to them."""
    DROP = enum.auto()
    FOLLOW = enum.auto()
    """Whatever the others do: this worker has run out of batches."""


_IN_WORDS = {
    Intent.LOOK: "reads gradients",
    Intent.CLIP: "clips gradients",
    Intent.SCALE: "unscales gradients",
    Intent.STEP: "calls optimizer.step()",
    Intent.ADD: "runs another backward",
    Intent.DROP: "drops its gradients (zero_grad(), or an exception in backward)",
}


@dataclass(frozen=True)
class Answer:
    """What all workers have said: their intents, by rank, and the slots that any has used."""

    intents: tuple[Intent, ...]
    used: frozenset[int]

    @property
    def doing(self) -> set[Intent]:
        """What the workers do that still have batches."""
        return set(self.intents) - {Intent.FOLLOW}

    @property
    def followed(self) -> bool:
        """Whether a worker has run out of batches."""
        return Intent.FOLLOW in self.intents

    def follows(self, rank: int) -> bool:
        """Whether ``rank`` has run out of batches."""
        return self.intents[rank] is Intent.FOLLOW

    @property
    def leader(self) -> int:
        """The first rank that still has batches."""
        return next(r for r, intent in enumerate(self.intents) if intent is not Intent.FOLLOW)

    @property
    def wants_whole(self) -> bool:
        """Whether gradients have to be gathered before anything else is done with them.

        A worker without batches cannot clip as the others do, but can take over their gradients.
        """
        alone = {Intent.CLIP, Intent.SCALE} if self.followed else set()
        return bool(self.doing & {Intent.LOOK, *alone})

    def check(self) -> None:
        """Make sure that all do the same.

        Raises:
            UsageError: they do not; on every rank.
        """
        if len(self.doing) == 1:
            return
        first = self.intents[self.leader]
        other = next(
            r for r, intent in enumerate(self.intents) if intent not in (first, Intent.FOLLOW)
        )
        raise UsageError(
            f"rank {self.leader} {_IN_WORDS[first]} while rank {other} "
            f"{_IN_WORDS[self.intents[other]]}; with shard_optimizer all ranks must do the same "
            "after a backward"
        )


class Rounds:
    """One small all-gather at a time, of a byte and one bit for each slot from every worker.

    It goes over the links from the host's memory, also where gradients are on a GPU: what comes
    back decides what the host queues next.
    """

    def __init__(self, collectives: Collectives, slots: int) -> None:
        self._collectives = collectives
        self._width = 1 + -(-slots // 8)
        self._rows = torch.zeros(0, dtype=torch.uint8)
        self._handle: Handle | None = None

    def start(self, intent: Intent, used: Iterable[int]) -> None:
        """Tell everyone what this worker does, and which slots it has gradients for."""
        row = bytearray(self._width)
        row[0] = intent
        for index in used:
            row[1 + index // 8] |= 1 << index % 8
        world = self._collectives.world
        self._rows = torch.zeros(world.size, self._width, dtype=torch.uint8)
        self._rows[world.rank] = torch.frombuffer(row, dtype=torch.uint8)
        self._handle = self._collectives.all_gather(self._rows.view(-1), label="intents")

    def finish(self) -> Answer:
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
