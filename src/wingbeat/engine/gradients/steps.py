"""Whether all workers make the same optimizer steps: otherwise their weights part in silence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

from wingbeat.engine.gradients.bucket import COUNTED
from wingbeat.errors import PeerError, UsageError


class Steps:
    """Counts this worker's steps since `distribute`.

    Every worker's count travels at the end of every bucket (`gradients.bucket.Bucket`): the check
    costs no message, and all workers find the same counts in the same backward. Workers need not
    have begun with the same count after `Join`, so it can be set.

    Attributes:
        rank: this worker's.
        count: how many steps it has made.
        parted: whether the workers were found to have made different numbers of steps.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.count = 0
        self.parted = False

    def check(self, counts: Sequence[float]) -> None:
        """Compare the counts that a bucket has brought; all workers come to the same result.

        Args:
            counts: by rank, the number of steps modulo `COUNTED`, plus 1; 0 for a worker that has
                run out of batches.

        Raises:
            UsageError: they differ; names every rank's number of steps before that backward.
            PeerError: one of them is no such number.
        """
        if len({count for count in counts if count}) <= 1:
            return
        for rank, count in enumerate(counts):
            if count not in range(COUNTED + 1):
                raise PeerError(
                    f"rank {self.rank}: rank {rank} sent {count!r} where its number of steps was "
                    f"due, 0 to {COUNTED}; all workers have to run the same wingbeat"
                )
        self.differ(
            {
                rank: _nearest(int(count) - 1, self.count)
                for rank, count in enumerate(counts)
                if count
            }
        )

    def differ(self, made: Mapping[int, int]) -> NoReturn:
        """End training, as the workers have made different numbers of steps.

        Args:
            made: by rank.

        Raises:
            UsageError: names every rank's number of steps.
        """
        self.parted = True
        raise UsageError(
            f"the workers have made different numbers of optimizer steps ({_listed(made)}), so "
            "their weights are no longer the same: after each backward call optimizer.step() on "
            "all ranks or on none; to skip a batch, decide so on all ranks alike"
        )


def _nearest(remainder: int, base: int) -> int:
    """Return the number nearest to ``base`` that leaves ``remainder`` when divided."""
    half = COUNTED // 2
    return base + (remainder - base + half) % COUNTED - half


def _listed(made: Mapping[int, int]) -> str:
    """Name every rank's count; ranks in succession with the same count together.

    >>> _listed({0: 4, 1: 3, 2: 4, 3: 4})
    'rank 0 4, rank 1 3, ranks 2-3 4'
    """
    runs: list[list[int]] = []
    for rank, count in sorted(made.items()):
        if runs and runs[-1][1:] == [rank - 1, count]:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank, count])
    return ", ".join(
        f"rank {first} {count}" if first == last else f"ranks {first}-{last} {count}"
        for first, last, count in runs
    )
