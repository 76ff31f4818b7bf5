"""Who started this process: what torchrun, srun and mpirun say of rank and address. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from wingbeat.errors import UsageError

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What ``torch.distributed`` reads; torchrun sets all of them."""

_PORTS = range(15000, 25000)
"""Below those that systems give to outgoing connections."""


@dataclass(frozen=True, slots=True)
class _Launcher:
    """The names under which a launcher says who a process is."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str


_LAUNCHERS = (
    # A batch script has SLURM_PROCID too, and is no task of a step: srun alone sets the number of
    # the step's tasks.
    _Launcher("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
    _Launcher(
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Launcher("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def from_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that ``torch.distributed`` needs and that are not set yet.

    What is set already holds: torchrun's, or an address that a batch script has exported. srun
    says where the first task runs; mpirun does not, except that all workers are on one host.

    Args:
        env: the environment of a process.

    Returns:
        ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT`` as far as
        they are missing; nothing for a process that was started alone.

    Raises:
        UsageError: the launcher does not say where rank 0 is, only a part is set, or a value is
            no number.
    """
    found = {} if "RANK" in env or "WORLD_SIZE" in env else _of_launcher(env)
    if not found and "RANK" not in env and "WORLD_SIZE" not in env:
        return {}
    missing = [name for name in VARIABLES if name not in env and name not in found]
    if missing:
        raise UsageError(
            f"{', '.join(missing)} not set in the environment: start the script with torchrun or "
            "`wingbeat lab run`, which set it, or with srun"
        )
    return {name: value for name, value in found.items() if name not in env}


def _of_launcher(env: Mapping[str, str]) -> dict[str, str]:
    for launcher in _LAUNCHERS:
        if launcher.rank in env and launcher.size in env:
            rank, size = _number(env, launcher.rank), _number(env, launcher.size)
            if size < 2:
                return {}
            found = {"RANK": str(rank), "WORLD_SIZE": str(size)}
            if launcher.local_rank in env:
                found["LOCAL_RANK"] = str(_number(env, launcher.local_rank))
            return found | _address(env, launcher, size)
    return {}


def _address(env: Mapping[str, str], launcher: _Launcher, size: int) -> dict[str, str]:
    """Return where the workers meet."""
    if launcher.name == "srun":
        nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
        job = int(re.sub(r"\D", "", env.get("SLURM_JOB_ID", "")) or 0)
        step = int(re.sub(r"\D", "", env.get("SLURM_STEP_ID", "")) or 0)
        port = _PORTS[(10 * job + step) % len(_PORTS)]
        return {"MASTER_ADDR": first_node(nodes), "MASTER_PORT": str(port)} if nodes else {}
    if _number(env, launcher.local_size, default=0) == size:
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_PORTS[0])}
    if "MASTER_ADDR" in env:
        return {"MASTER_PORT": str(_PORTS[0])}
    raise UsageError(
        f"mpirun has started {size} workers on several hosts and does not say where rank 0 is: "
        f"give it the first host's name, mpirun -x MASTER_ADDR=node1 -x MASTER_PORT={_PORTS[0]}"
    )


def first_node(nodes: str) -> str:
    """Return the first host of a list as SLURM writes it.

    >>> first_node("gpu[07-09,12],login1")
    'gpu07'
    """
    first = re.sub(r"\[([^\]\-,]*)[^\]]*\]", r"\1", nodes)
    return first.split(",")[0].strip()


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    if default is not None and name not in env:
        return default
    if not re.fullmatch(r"[0-9]{1,9}", env[name]):
        raise UsageError(f"{name}={env[name]!r} in the environment: a whole number is wanted")
    return int(env[name])
