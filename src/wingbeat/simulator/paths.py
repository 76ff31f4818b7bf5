"""Interfaces that join two hosts: one switch for each interface, or the switches of a BCube."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from wingbeat.simulator.network import Side
from wingbeat.topologies.bcube import BCube

Path = Sequence[tuple[Side, Side]]
"""Hops from host to host, each with the sending and the receiving interface."""

Paths = Callable[[int, int], Sequence[Path]]
"""Maps source and target to paths that carry equal shares."""


def first_interface(source: int, target: int) -> Sequence[Path]:
    """Return the only path where each host has one interface on one switch."""
    return [[((source, 0), (target, 0))]]


def star(interfaces: int) -> Paths:
    """Return the paths where interface ``l`` of each host is on switch ``l``."""

    def paths(source: int, target: int) -> Sequence[Path]:
        return [[((source, link), (target, link))] for link in range(interfaces)]

    return paths


def bcube(cube: BCube) -> Paths:
    """Return the paths of a BCube, where hosts forward between switches.

    There is one path, which corrects the lowest digit first, as the routes of a lab's BCube do.
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
