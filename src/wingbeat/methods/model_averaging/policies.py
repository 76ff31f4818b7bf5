"""Which groups are made when a worker asks and is in none (Ripples, sections 4.1, 5.1 and 5.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from wingbeat.methods.model_averaging.crowd import Crowd, shuffle
from wingbeat.methods.model_averaging.rules import Rules


class Policy(Protocol):
    """Makes groups."""

    def __call__(self, initiator: int, crowd: Crowd) -> list[list[int]]:
        """Return the groups to run for a request, in the order in which they are to run.

        Args:
            initiator: the worker that has asked, who is in one of them at least.
            crowd: whom they are chosen from; each group's members take part.
        """
        ...


def of_rules(rules: Rules) -> Policy:
    """Return the policy that ``rules`` name."""
    if rules.whole:
        return everyone
    if rules.inter_intra:
        return inter_and_intra
    return division if rules.division else one_at_random


def everyone(initiator: int, crowd: Crowd) -> list[list[int]]:
    """Make one group of all, whatever they are in."""
    assert initiator in crowd, "who asks takes part"
    return [list(crowd.here)]


def one_at_random(initiator: int, crowd: Crowd) -> list[list[int]]:
    """Make one group of the initiator and random others, whatever they are in (section 4.1)."""
    here, draw = crowd.here, crowd.chance.random
    group, floor = [initiator], crowd.floor(initiator)
    size = min(crowd.rules.size, len(here))
    if crowd.rules.threshold is None:
        # One more than is needed, as the initiator may be among them.
        drawn = crowd.chance.sample(here, size)
        return [group + [worker for worker in drawn if worker != initiator][: size - 1]]
    # So few may be fast enough that they are not found; then the group is smaller.
    for _ in range(_DRAWS * size):
        if len(group) == size:
            break
        worker = here[int(draw() * len(here))]
        if worker not in group and crowd.asked[worker] >= floor:
            group.append(worker)
    return [group]


_DRAWS = 8
"""How often a member is drawn until one is fast enough and not drawn yet."""


def division(initiator: int, crowd: Crowd) -> list[list[int]]:
    """Divide all idle workers into groups (section 5.1)."""
    return parts(crowd.idle_for(initiator), crowd.rules.size)


def inter_and_intra(initiator: int, crowd: Crowd) -> list[list[int]]:
    """Give each idle worker two groups (section 5.2).

    A random worker of each host, its head, is in a group of heads, and the others are in groups
    within their host; then all of a host are in one. Only workers that are idle count in any of
    this. Whoever has no partner gets a group of its own, so that it is as many steps away from the
    second group as the others are. With ``rules.filter_intra``, who is too slow for the fastest
    worker's groups is in no second group with others.
    """
    host_of, size = crowd.layout.host_of, crowd.rules.size
    hosts: dict[int, list[int]] = {}
    for worker in crowd.idle_for(initiator):
        hosts.setdefault(host_of[worker], []).append(worker)
    heads = [local[0] for local in hosts.values()]
    # A host with many workers is likely to come first.
    shuffle(heads, crowd.chance)
    groups = parts(heads, size)
    for local in hosts.values():
        groups += parts(local[1:], size)
    floor = crowd.floor(crowd.fastest) if crowd.rules.filter_intra else 0
    for local in hosts.values():
        groups += of_like_speed(local, crowd.asked, floor)
    return groups


def of_like_speed(workers: Sequence[int], asked: Sequence[int], floor: int) -> list[list[int]]:
    """Divide a host's workers into those that have asked so often, and each other one by itself.

    A second group waits for its members' next steps: in one with a slow worker, the others would
    make as few as it does, and then count as slow too. The paper filters first groups alone.

    >>> of_like_speed([0, 1, 2], asked=[9, 2, 8], floor=6)
    [[0, 2], [1]]
    """
    fast = [worker for worker in workers if asked[worker] >= floor]
    alone = [[worker] for worker in workers if asked[worker] < floor]
    return [fast, *alone] if fast else alone


def parts(workers: Sequence[int], size: int) -> list[list[int]]:
    """Cut into parts of about ``size``, as equal as can be; none has one worker if avoidable.

    >>> [len(part) for part in parts(range(8), 3)], [len(part) for part in parts(range(7), 3)]
    ([3, 3, 2], [4, 3])
    """
    n = len(workers)
    if not n:
        return []
    number = max(1, (n + (size - 1) // 2) // size)
    short, longer = divmod(n, number)
    out, start = [], 0
    for part in range(number):
        stop = start + short + (part < longer)
        out.append(list(workers[start:stop]))
        start = stop
    return out
