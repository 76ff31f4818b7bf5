"""Rates and CPU shares of a row, from each worker's clock and the processes' CPU time.

Every process of a bench has a role: it trains, or it is a server that a training process started.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WORKER = "worker"
"""The role of a process that trains."""

SERVER = "server"
"""The role of the parameter servers that a worker has started, combined."""

CORES_FULL = 0.8
"""Share of the cores' time from which a row counts as limited by them.

Less than 1: processes wait for each other between the bursts of an exchange, and the kernel's work
for the links outside of any process is not counted.
"""

Stamps = Sequence[Sequence[float]]
"""For each worker, when each iteration began and when the last one ended; seconds."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Iterations per second: of all workers together, and of each by its rank."""

    total: float
    by_rank: list[float]


def samples_by_rank_s(blocks: Sequence[Stamps]) -> list[list[float]]:
    """Seconds of each worker's iterations by its own clock, over all blocks."""
    return [
        [after - before for stamps in own for before, after in itertools.pairwise(stamps)]
        for own in zip(*blocks, strict=True)
    ]


def rates(samples: Sequence[Sequence[float]]) -> Rates:
    """Iterations per second of workers whose iterations took so many seconds each."""
    by_rank = [len(own) / sum(own) for own in samples]
    return Rates(sum(by_rank), by_rank)


def cpu_s_per_iteration(
    blocks: Sequence[Mapping[str, Sequence[float]]], iterations: int
) -> dict[str, list[float]]:
    """CPU seconds per iteration of each process, by role and rank; servers by their worker."""
    roles = {role: len(own) for block in blocks for role, own in block.items()}
    return {
        role: [
            sum(own) / iterations
            for own in zip(*(b.get(role, [0.0] * ranks) for b in blocks), strict=True)
        ]
        for role, ranks in sorted(roles.items())
    }


def cores_share(
    stamps: Sequence[Stamps], cpu_s: Sequence[Mapping[str, Sequence[float]]], cores: int
) -> float:
    """Share of the cores' time, 0 to 1, that the bench's processes used in the timed iterations.

    ``stamps`` and ``cpu_s`` (seconds, by role) are those of each block.
    """
    wall = sum(max(own[-1] for own in each) - min(own[0] for own in each) for each in stamps)
    used = sum(sum(own) for block in cpu_s for own in block.values())
    return used / (cores * wall)
