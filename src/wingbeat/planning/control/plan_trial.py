"""Which of several plans makes iterations shortest: a state machine that lets them take turns.

Predictions miss what they do not know: other jobs, caches, threads that wait for each other. So
whole iterations are timed in the run itself, a block of them with each plan, to and fro, so that a
machine that becomes slower does so for all. What is clearly slower is left out of later rounds.
One `PlanTrial` runs on every worker. All hear the same rows and conclude the same from them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from wingbeat.errors import PeerError

ROW_LENGTH = 2
"""A row: seconds of an iteration, 0 if unknown, and the number of the block it belongs to."""

LAPS = 6
"""Iterations that count in a block."""

SETTLING = 2
"""Iterations at the begin of a block that do not count, for buffers and sockets to get warm."""

BEHIND = (0.10, 0.05, 0.02, 0.01)
"""After each round, by how much of the least median a plan may be behind to stay in; so many
rounds there are at most. A plan stays as well while a quarter of its laps are as short as that
median: then it is noise that parts the two."""

_LONGEST_S = 1e9


class PlanTrial:
    """One worker's part in finding out with which plan iterations are shortest.

    Args:
        count: of plans, 1 or more; with a single one there is nothing to find out.
        rank: this worker's.
        size: number of workers.

    Attributes:
        plan: the number of the plan to be used now.
        block: the number of the present block.
        done: the decision is made, and is in ``plan``.
        laps: by plan, seconds of each counted iteration, the mean of all workers.
    """

    def __init__(self, count: int, rank: int, size: int) -> None:
        self.plan = 0
        self.block = 0
        self.done = count == 1
        self.laps: list[list[float]] = [[] for _ in range(count)]
        self._rank, self._size = rank, size
        self._left = list(range(count))
        self._turns = list(self._left)
        self._round = 0
        self._heard = 0

    @property
    def medians(self) -> list[float]:
        """By plan, the median of its laps; infinite without any."""
        return [statistics.median(laps) if laps else math.inf for laps in self.laps]

    def report(self, seconds: float) -> list[float]:
        """Return the row for the next exchange: what the last iteration took, 0 if unknown."""
        known = 0.0 < seconds <= _LONGEST_S
        return [float(seconds) if known else 0.0, float(self.block)]

    def take(self, rows: Sequence[Sequence[float]]) -> bool:
        """Hear one exchange; return whether ``plan`` has changed or the trial is done.

        Raises:
            PeerError: a row is malformed; names the rank that sent it.
        """
        self._check(rows)
        if self.done or any(row[1] != self.block or row[0] == 0 for row in rows):
            return False
        self._heard += 1
        if self._heard > SETTLING:
            self.laps[self.plan].append(math.fsum(row[0] for row in rows) / self._size)
        if self._heard < SETTLING + LAPS:
            return False
        return self._next_block()

    def _next_block(self) -> bool:
        self.block += 1
        self._heard = 0
        self._turns.pop(0)
        if not self._turns:
            self._next_round()
        before, self.plan = self.plan, self._turns[0]
        return self.done or self.plan != before

    def _next_round(self) -> None:
        medians = self.medians
        least = min(medians[plan] for plan in self._left)
        most = (1.0 + BEHIND[self._round]) * least
        self._left = [
            plan for plan in self._left if medians[plan] <= most or self._quarter(plan) <= least
        ]
        self._round += 1
        self.done = len(self._left) == 1 or self._round == len(BEHIND)
        if self.done:
            self._turns = [min(self._left, key=medians.__getitem__)]
        else:
            back = self._round % 2 == 1
            self._turns = self._left[::-1] if back else list(self._left)

    def _quarter(self, plan: int) -> float:
        """Return the seconds that a quarter of a plan's laps do not exceed."""
        laps = sorted(self.laps[plan])
        return laps[max(0, len(laps) // 4 - 1)]

    def _check(self, rows: Sequence[Sequence[float]]) -> None:
        for rank, row in enumerate(rows):
            right = len(row) == ROW_LENGTH and all(math.isfinite(v) and v >= 0 for v in row)
            if not right or row[0] > _LONGEST_S or row[1] > len(BEHIND) * len(self.laps):
                raise PeerError(
                    f"rank {self._rank}: rank {rank} sent a malformed row of a trial of plans: "
                    f"{list(row)[:4]!r}; all workers have to run the same wingbeat"
                )
        if len(rows) != self._size:
            raise PeerError(
                f"rank {self._rank}: the exchange of a trial of plans brought {len(rows)} of "
                f"{self._size} rows"
            )
