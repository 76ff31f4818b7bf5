"""Which cards join two hosts: one switch for each interface, or a BCube's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from wingbeat.simulator.network import Side
from wingbeat.topologies.bcube import BCube

Path = Sequence[tuple[Side, Side]]
"""From host to host, the card that sends and the card that receives."""

Paths = Callable[[int, int], Sequence[Path]]
"""From source and target to paths, each of which carries an equal share."""


def first_interface(source: int, target: int) -> Sequence[Path]:
    """Return the only path where each host has one interface on one switch."""
    return [[((source, 0), (target, 0))]]


def star(interfaces: int) -> Paths:
    """Return the paths where each host's interface ``l`` is on the switch number ``l``."""

    def paths(source: int, target: int) -> Sequence[Path]:
        return [[((source, link), (target, link))] for link in range(interfaces)]

    return paths


def bcube(cube: BCube) -> Paths:
    """Return the paths of a BCube, where hosts pass on what is not for their own switch.

    One path, which corrects the lowest digit first, as the routes of a lab's BCube do.
    """

    def paths(source: int, target: int) -> Sequence[Path]:
        hops, at = [], source
        for level in range(cube.levels):
            after = cube.cube(at, level)[cube.digit(target, level)]
            if after != at:
                hops.append(((at, level), (after, level)))
                at = after
        return [hops]

    return paths
