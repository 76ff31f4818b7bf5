"""Who asks and who is asked: the bipartite split of the workers. Pure.

Ranks alternate. torchrun numbers the workers of a host one after the other, so each host with two
workers or more has both kinds: its workers average among themselves too, and the traffic is spread
over all hosts. If halves of the ranks were the sets, all that is sent would go from some hosts to
the others.
"""

from __future__ import annotations


def is_active(rank: int) -> bool:
    """Whether the worker asks others; if not, it is asked.

    Of an odd number of workers the larger part is active, as each of their steps is averaged with
    somebody's; a single worker finds nobody to ask.
    """
    return rank % 2 == 0


def partners(rank: int, workers: int) -> tuple[int, ...]:
    """Return those of the other set: whom an active worker may ask, or who may ask a passive one.

    >>> partners(0, 5), partners(1, 5)
    ((1, 3), (0, 2, 4))
    """
    return tuple(range(1 - rank % 2, workers, 2))
