"""Topologies: frozen dataclasses with pure functions from (rank, blocks) to rounds of hops.

``collectives`` executes the rounds on links, and a simulator computes their cost. Topologies do no
I/O.
"""

from __future__ import annotations

from dataclasses import replace

from wingbeat.errors import UsageError, unknown
from wingbeat.topologies.bcube import BCube, parse_size
from wingbeat.topologies.hierarchical import Hierarchical
from wingbeat.topologies.topology import Doubling, Mesh, Ring, Topology
from wingbeat.types import Layout

__all__ = [
    "BY_NAME", "BCube", "Doubling", "Hierarchical", "Mesh", "Ring", "Topology", "fitted", "get",
    "in_few_rounds", "name_of", "parse_size",
]  # fmt: skip

BY_NAME: dict[str, Topology] = {
    "ring": Ring(),
    "mesh": Mesh(),
    "doubling": Doubling(),
    "bcube": BCube(),
}


def get(name: str | Topology) -> Topology:
    """Return the topology called ``name``; a BCube may include its size, as in ``"bcube@3x2"``.

    A topology itself is returned as it is. An unknown name is a `UsageError`.
    """
    if isinstance(name, Topology):
        return name
    kind, at, size = name.partition("@")
    if kind == "bcube" and at:
        return BCube(*parse_size(size))
    if name not in BY_NAME:
        raise unknown("topology", name, BY_NAME)
    return BY_NAME[name]


def fitted(name: str | Topology, layout: Layout, interfaces: int) -> Topology:
    """Return the topology for these workers with ``interfaces`` each.

    A ring or mesh of hosts of which some have several workers is `Hierarchical`.

    Raises:
        UsageError: the name is unknown, or the topology does not support these numbers.
    """
    found = get(name).fitted(layout.workers, interfaces)
    if isinstance(found, Ring | Mesh) and 1 < len(layout.hosts) < layout.workers:
        return Hierarchical(layout, direct=isinstance(found, Mesh))
    return found


def in_few_rounds(topology: Topology) -> Topology:
    """Return the topology of small collectives, whose time is that of their rounds.

    Doubling has the fewest where every worker has links of its own. Where hosts have several
    workers, which share their host's links, doubling and a mesh of all workers send each block
    once for every worker of a host; `Hierarchical` sends it once for the host, in two rounds
    between hosts if aggregators exchange with owners directly.
    """
    if isinstance(topology, Hierarchical):
        return replace(topology, direct=True)
    return Doubling()


def name_of(topology: Topology) -> str:
    """Return the name by which a topology is sent to workers; `UsageError` if it has none."""
    if type(topology) is BCube and topology.levels:
        return f"bcube@{topology.size}"
    for name, known in BY_NAME.items():
        if topology == known:
            return name
    raise UsageError(
        f"topology {topology!r} has no name in wingbeat.topologies.BY_NAME; allowed are "
        f"{', '.join(map(repr, BY_NAME.values()))}"
    )
