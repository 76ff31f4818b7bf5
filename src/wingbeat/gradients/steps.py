"""Whether all workers make the same optimizer steps: otherwise their weights part in silence."""

from __future__ import annotations

import contextlib
from typing import NoReturn

from wingbeat.errors import UsageError
from wingbeat.transport.world import World

PATIENCE = 5.0
"""Seconds to give the other workers to find out too, and to say how many steps they have made."""


class Steps:
    """Counts this worker's steps since `distribute`.

    The count travels at the end of every bucket (`wingbeat.gradients.bucket.TURNS`), so that it
    costs no message. Workers need not have begun with the same count after `Join`, so it can be
    set.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.count = 0

    def disagree(self) -> NoReturn:
        """Say who has made how many steps; every worker comes here.

        Raises:
            UsageError: always.
        """
        world = self._world
        key = f"{world.channel}/steps"
        counts: dict[int, str] = {world.rank: str(self.count)}
        with contextlib.suppress(RuntimeError):
            world.store.set(f"{key}/{world.rank}", str(self.count))
        for rank in range(world.size):
            if rank != world.rank:
                with contextlib.suppress(TimeoutError, RuntimeError):
                    counts[rank] = world.store.get(f"{key}/{rank}", min(PATIENCE, world.timeout))
        said = ", ".join(f"rank {r} {n[:20]}" for r, n in sorted(counts.items()))
        raise UsageError(
            f"the workers have made different numbers of optimizer steps ({said}), so their "
            "weights are no longer the same: after each backward call optimizer.step() on all "
            "ranks or on none; to skip a batch, decide so on all ranks alike"
        )
