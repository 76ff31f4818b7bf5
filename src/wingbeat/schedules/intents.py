"""The announced use of gradients by each worker, and the result if uses differ.

With a sharded optimizer an all-gather carries either gradients, because they are read, or
parameters, after a step. The user's code determines which, and some code reads gradients on one
rank only. Before either is queued, every worker therefore announces in a few bytes what it will do,
and the parameters for which it has a gradient.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from wingbeat.errors import UsageError


class Intent(enum.IntEnum):
    """How a worker will use the gradients of the last backward."""

    LOOK = enum.auto()
    """Read them; the other workers need not."""
    CLIP = enum.auto()
    SCALE = enum.auto()
    STEP = enum.auto()
    ADD = enum.auto()
    """Run another backward that accumulates into them."""
    DROP = enum.auto()
    FOLLOW = enum.auto()
    """Follow the others: this worker has run out of batches."""


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
    """The announcements of all workers: intents by rank, and parameters that any worker used."""

    intents: tuple[Intent, ...]
    used: frozenset[int]

    @property
    def doing(self) -> set[Intent]:
        """Intents of the workers that still have batches."""
        return set(self.intents) - {Intent.FOLLOW}

    @property
    def followed(self) -> bool:
        """Whether any worker has run out of batches."""
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
        """Whether gradients have to be gathered before any other use.

        A worker without batches cannot clip as the others do, but can copy their gradients.
        """
        alone = {Intent.CLIP, Intent.SCALE} if self.followed else set()
        return bool(self.doing & {Intent.LOOK, *alone})

    def check(self) -> None:
        """Raise a `UsageError`, on every rank, unless all workers announced the same use."""
        if len(self.doing) == 1:
            return
        first = self.intents[self.leader]
        other = next(
            r for r, intent in enumerate(self.intents) if intent not in (first, Intent.FOLLOW)
        )
        raise UsageError(
            f"rank {self.leader} {_IN_WORDS[first]} while rank {other} "
            f"{_IN_WORDS[self.intents[other]]}; with a divided optimizer (shard_optimizer, "
            'update="server") all ranks must do the same after a backward'
        )
