"""The environment of a worker: torchrun's variables and the lab's defaults."""

from __future__ import annotations

from collections.abc import Mapping

from wingbeat_lab.lab.spec import LabSpec

MASTER_PORT = 29500
"""Any port is free in a private network namespace; a loopback lab chooses one."""


def worker_environment(
    base: Mapping[str, str], spec: LabSpec, rank: int, per_host: int, master: tuple[str, int]
) -> dict[str, str]:
    """Return the environment of worker ``rank``; each host has ``per_host`` consecutive ranks.

    The lab always sets ranks and the master address; it sets threads and interfaces only where
    ``base`` does not.
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
    # An outer torchrun would make torch use its agent's store, which is outside the lab.
    kept = {k: v for k, v in base.items() if k != "TORCHELASTIC_USE_AGENT_STORE"}
    return {**defaults, **kept, **own}
