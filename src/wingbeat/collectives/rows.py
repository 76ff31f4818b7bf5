"""One row of numbers from every worker, for every worker: how all small decisions are shared."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from wingbeat.collectives.engine import Collectives
from wingbeat.collectives.handle import Handle


class Rows:
    """A small all-gather under way, of as many numbers from each worker.

    Args:
        collectives: over which links.
        row: this worker's numbers, as many as every other worker's.
        label: what is exchanged, for messages.
        device: where the rows are; on a GPU nobody waits for them before they are read.
    """

    def __init__(
        self,
        collectives: Collectives,
        row: Sequence[float] | torch.Tensor,
        label: str,
        device: torch.device | None = None,
    ) -> None:
        mine = torch.as_tensor(row, dtype=torch.float64, device=device).reshape(-1)
        world = collectives.world
        self._rows = torch.zeros(world.size, mine.numel(), dtype=torch.float64, device=device)
        self._rows[world.rank] = mine
        self._handle: Handle = collectives.all_gather(self._rows.view(-1), label=label)

    def wait(self) -> torch.Tensor:
        """Return all rows: float64, shape ``(workers, numbers)``, equal on every worker.

        Raises:
            PeerError: a worker failed, or sent nothing in time.
        """
        self._handle.wait()
        return self._rows
