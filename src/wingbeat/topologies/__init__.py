"""Where pieces go: frozen values with pure functions from (rank, blocks) to rounds of hops.

The same rounds are executed on real links by ``collectives`` and priced by a simulator; nothing
here does I/O.
"""

from __future__ import annotations

from wingbeat.errors import UsageError, unknown
from wingbeat.topologies.bcube import BCube, parse_size
from wingbeat.topologies.doubling import Doubling
from wingbeat.topologies.mesh import Mesh
from wingbeat.topologies.ring import Ring
from wingbeat.topologies.topology import Topology

__all__ = [
    "BY_NAME",
    "BCube",
    "Doubling",
    "Mesh",
    "Ring",
    "Topology",
    "get",
    "name_of",
    "parse_size",
]

BY_NAME: dict[str, Topology] = {
    "ring": Ring(),
    "mesh": Mesh(),
    "doubling": Doubling(),
    "bcube": BCube(),
}


def get(name: str) -> Topology:
    """Return the topology of that name; a BCube may have its size, as in ``"bcube@3x2"``.

    Raises:
        UsageError: there is none.
    """
    kind, at, size = name.partition("@")
    if kind == "bcube" and at:
        return BCube(*parse_size(size))
    if name not in BY_NAME:
        raise unknown("topology", name, BY_NAME)
    return BY_NAME[name]


def name_of(topology: Topology) -> str:
    """Return the topology's name.

    Raises:
        UsageError: it has none, so that no worker could be told of it.
    """
    if type(topology) is BCube and topology.levels:
        return f"bcube@{topology.size}"
    for name, known in BY_NAME.items():
        if topology == known:
            return name
    raise UsageError(
        f"topology {topology!r} has no name in wingbeat.topologies.BY_NAME; allowed are "
        f"{', '.join(map(repr, BY_NAME.values()))}"
    )
