"""The environment a worker finds: what torchrun sets, and the lab's own defaults."""

from __future__ import annotations

from collections.abc import Mapping

from wingbeat_lab.lab.spec import LabSpec

MASTER_PORT = 29500
"""Any port is free in a network of one's own; loopback picks one."""


def worker_environment(
    base: Mapping[str, str], spec: LabSpec, rank: int, per_host: int, master: tuple[str, int]
) -> dict[str, str]:
    """Environment of worker ``rank``: ranks count through the hosts, ``per_host`` on each.

    Ranks and the meeting point are always the lab's; threads and interfaces only where ``base``
    does not set them.
    """
    host, local = divmod(rank, per_host)
    names = ",".join(f"eth{k}" for k in range(spec.rails)) if spec.shaped else "lo"
    defaults = {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "GLOO_SOCKET_IFNAME": names,
        "NCCL_SOCKET_IFNAME": names,
    }
    own = {
        "RANK": str(rank),
        "WORLD_SIZE": str(spec.hosts * per_host),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(per_host),
        "GROUP_RANK": str(host),
        "NODE_RANK": str(host),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
        "WINGBEAT_LAB": spec.to_text(),
    }
    # A torchrun further out would make torch look for its agent's store, which is not in the lab.
    kept = {k: v for k, v in base.items() if k != "TORCHELASTIC_USE_AGENT_STORE"}
    return {**defaults, **kept, **own}
