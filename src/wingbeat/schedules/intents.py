"""What workers are about to do with their gradients, and what follows if they differ.

With a sharded optimizer an all-gather carries either gradients, because somebody looks at them,
or parameters, after a step. Which of the two is not the plan's to say but the user's, and some
only look at gradients on one rank. So before either is queued, every worker tells in a few bytes
what it is about to do, and which parameters it has a gradient for.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from wingbeat.errors import UsageError


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
    """What all workers have said: their intents, by rank, and the parameters that any has used."""

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
            f"{_IN_WORDS[self.intents[other]]}; with a divided optimizer (shard_optimizer, "
            'update="server") all ranks must do the same after a backward'
        )
