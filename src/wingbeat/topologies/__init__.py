"""Where pieces go: pure functions from (rank, blocks) to rounds of Steps.

``blocks[i]`` is the span that rank ``i`` owns. The same rounds are executed on real links by
``collectives`` and can be priced by a simulator; nothing here does I/O.
"""

from __future__ import annotations

from types import ModuleType

from wingbeat.errors import unknown
from wingbeat.topologies import doubling, mesh, ring

_MODULES = {"ring": ring, "mesh": mesh, "doubling": doubling}


def get(name: str) -> ModuleType:
    """Return the topology's module: ``reduce_scatter``, ``all_gather`` and ``all_reduce``.

    Raises:
        UsageError: no topology of that name.
    """
    if name not in _MODULES:
        raise unknown("topology", name, _MODULES)
    return _MODULES[name]
