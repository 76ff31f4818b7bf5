"""Rank, address and job as set by the launchers torchrun, srun and mpirun."""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from wingbeat.errors import UsageError

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that ``torch.distributed`` reads; torchrun sets all of them."""

JOB = "WINGBEAT_JOB_ID"
"""Variable that names a job, to distinguish two jobs that use one address and port by mistake."""

_PORTS = range(15000, 25000)
"""Ports below the range of outgoing connections."""

_MPI_JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID")
"""Variables with mpirun's job name, equal on all hosts: Open MPI 5, Open MPI 4, MPICH."""


@dataclass(frozen=True, slots=True)
class _Launcher:
    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str


_LAUNCHERS = (
    # A batch script has SLURM_PROCID too but is not a task of a step. Only srun sets the number of
    # tasks of the step.
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


def launcher_process(variable: str) -> str:
    """Return a name of the process that started all ranks of this host; empty if not found.

    It is the nearest ancestor without the rank ``variable`` in its environment; shells in between
    have it.
    """
    pid = os.getppid()
    try:
        while pid > 0:
            _, _, fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
            parent, begun = fields.split()[1], fields.split()[19]
            if not _has_variable(pid, variable):
                return f"{socket.gethostname()}-{pid}-{begun}"
            pid = int(parent)
    except (OSError, ValueError, IndexError):
        pass
    return ""


def _has_variable(pid: int, variable: str) -> bool:
    try:
        lines = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except PermissionError:  # a process of another user, such as the launcher, is not a rank
        return False
    return any(line.startswith(f"{variable}=".encode()) for line in lines)


def job_name(env: Mapping[str, str]) -> str:
    """Return the job's name; empty if the environment has none."""
    run = env.get("TORCHELASTIC_RUN_ID", "")
    return env.get(JOB) or ("" if run == "none" else run)  # torchrun's default name


def from_environment(
    env: Mapping[str, str], find_launcher: Callable[[str], str] = launcher_process
) -> dict[str, str]:
    """Return the variables that `wingbeat.init` needs and that are not set yet.

    Variables that are set take precedence: torchrun's, or an address that a batch script exported.
    srun provides the host of the first task. mpirun provides an address only if all workers are on
    one host. The port is derived from the job's name, so that two jobs seldom share one. The result
    is empty for a process without a launcher. A `UsageError` if rank 0's address is missing, only
    some of the variables are set, or a value is not a number.
    """
    found = {} if "RANK" in env or "WORLD_SIZE" in env else _launcher_variables(env, find_launcher)
    if not found and "RANK" not in env and "WORLD_SIZE" not in env:
        return {}
    missing = [name for name in VARIABLES if name not in env and name not in found]
    if missing:
        raise UsageError(
            f"{', '.join(missing)} not set in the environment: start the script with torchrun or "
            "`wingbeat lab run`, which set it, or with srun; or export it, the same on all workers"
        )
    return {name: value for name, value in found.items() if name not in env}


def _launcher_variables(
    env: Mapping[str, str], find_launcher: Callable[[str], str]
) -> dict[str, str]:
    for launcher in _LAUNCHERS:
        if launcher.rank in env and launcher.size in env:
            rank, size = parse_count(env, launcher.rank), parse_count(env, launcher.size)
            if size < 2:
                return {}
            found = {"RANK": str(rank), "WORLD_SIZE": str(size)}
            if launcher.local_rank in env:
                found["LOCAL_RANK"] = str(parse_count(env, launcher.local_rank))
            job = env.get(JOB) or _job_id(env, launcher, size, find_launcher)
            return found | _address(env, launcher, size, job) | ({JOB: job} if job else {})
    return {}


def _job_id(
    env: Mapping[str, str], launcher: _Launcher, size: int, find_launcher: Callable[[str], str]
) -> str:
    """Return a job name that is equal on all hosts of this job only; empty if none."""
    if launcher.name == "srun":
        job, step = env.get("SLURM_JOB_ID", ""), env.get("SLURM_STEP_ID", "")
        return f"slurm {job}.{step}" if job and step else ""
    for name in _MPI_JOBS:
        if env.get(name):
            return f"mpirun {env[name]}"
    local = parse_count(env, launcher.local_size, default=0) == size
    by = find_launcher(launcher.rank) if local else ""
    return f"mpirun {by}" if by else ""


def _address(env: Mapping[str, str], launcher: _Launcher, size: int, job: str) -> dict[str, str]:
    port = {"MASTER_PORT": str(_job_port(job))} if job else {}
    if launcher.name == "srun":
        nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
        return {"MASTER_ADDR": first_node(nodes)} | port if nodes else {}
    if parse_count(env, launcher.local_size, default=0) == size:
        return {"MASTER_ADDR": "127.0.0.1"} | port
    if "MASTER_ADDR" in env:
        return port
    raise UsageError(
        f"mpirun has started {size} workers on several hosts and gives no address of rank 0: "
        "set the first host's name and a free port, "
        "mpirun -x MASTER_ADDR=node1 -x MASTER_PORT=29500"
    )


def _job_port(job: str) -> int:
    number = int.from_bytes(hashlib.sha256(job.encode(errors="surrogatepass")).digest()[:8], "big")
    return _PORTS[number % len(_PORTS)]


def first_node(nodes: str) -> str:
    """Return the first host of a SLURM node list.

    >>> first_node("gpu[07-09,12],login1")
    'gpu07'
    """
    first = ""
    for part in re.finditer(r"[^\[,]+|\[([^\],\-]*)[^\]]*\]?|,", nodes):
        if part[0] == ",":
            break
        first += part[0] if part[1] is None else part[1]
    return first.strip()


def parse_count(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return a variable of an environment; a `UsageError` if it is no whole number."""
    if default is not None and name not in env:
        return default
    if not re.fullmatch(r"[0-9]{1,9}", env[name]):
        raise UsageError(f"{name}={env[name]!r} in the environment: it must be a whole number")
    return int(env[name])
