"""Replicas of several ranks as threads: the column of each rank, with what its replica shares."""

from __future__ import annotations

from wingbeat.transport.loopback import Switchboard, worlds
from wingbeat.transport.mesh import Replica
from wingbeat.transport.world import World


def columns(
    replicas: int,
    size: int,
    *,
    timeout: float = 20.0,
    switchboards: list[Switchboard] | None = None,
) -> list[World]:
    """The world of each rank of the job: its column. ``switchboards``: one for each column."""
    inside = Switchboard()
    ranks = [tuple(range(n * size, (n + 1) * size)) for n in range(replicas)]
    found: dict[int, World] = {}
    for column in range(size):
        switch = switchboards[column] if switchboards else Switchboard()
        for world in worlds(replicas, timeout=timeout, switchboard=switch):
            number = world.rank
            world.members = tuple(of[column] for of in ranks)
            world.inside = Replica(
                number, column, ranks[number], (), (), "cpu", tuple(ranks), inside, ranks[number][0]
            )
            found[ranks[number][column]] = world
    return [found[rank] for rank in sorted(found)]
