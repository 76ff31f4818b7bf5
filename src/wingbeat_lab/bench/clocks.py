"""Each worker's own clock, and the processors' time: from a row's blocks to rates and shares.

Every process of a bench stands under its role: those that train, and the servers that these have
started.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WORKER = "worker"
"""The role of a process that trains."""

SERVER = "server"
"""The role of the parameter servers that a worker has started, all in one."""

CORES_FULL = 0.8
"""Share of the cores' time from which a row is said to be limited by them.

Not 1: between the bursts of an exchange processes wait for each other, and what the kernel does for
the links outside of any process is not counted."""

Stamps = Sequence[Sequence[float]]
"""For each worker, when each iteration began and when the last one was over; seconds."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Iterations a second: of all workers together, and of each by its rank."""

    total: float
    by_rank: list[float]


def samples_by_rank_s(blocks: Sequence[Stamps]) -> list[list[float]]:
    """Seconds of each worker's iterations by its own clock, over all blocks."""
    return [
        [after - before for stamps in own for before, after in itertools.pairwise(stamps)]
        for own in zip(*blocks, strict=True)
    ]


def rates(samples: Sequence[Sequence[float]]) -> Rates:
    """Iterations a second of workers that made these, in so many seconds each."""
    by_rank = [len(own) / sum(own) for own in samples]
    return Rates(sum(by_rank), by_rank)


def cpu_s_per_iteration(
    blocks: Sequence[Mapping[str, Sequence[float]]], iterations: int
) -> dict[str, list[float]]:
    """CPU seconds of each process an iteration, by role and rank; of each worker's servers in one.

    Args:
        blocks: by role, the seconds that each process took in a block.
        iterations: timed ones of all blocks together.
    """
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
    """Share of the cores' time, 0 to 1, that the bench's processes took over the timed iterations.

    Args:
        stamps: of each block.
        cpu_s: of each block, by role, the seconds that each process took.
        cores: that all of them share.
    """
    wall = sum(max(own[-1] for own in each) - min(own[0] for own in each) for each in stamps)
    used = sum(sum(own) for block in cpu_s for own in block.values())
    return used / (cores * wall)
