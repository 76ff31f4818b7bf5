"""Which start of a job this is, where torchrun restarts the processes of several hosts.

The store outlives a restart, and has what earlier processes have written. The ranks of one start
therefore need a name that no earlier start has. ``TORCHELASTIC_RESTART_COUNT`` is none: each host's
agent counts only the failures of its own processes.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping

from wingbeat.errors import RendezvousError
from wingbeat.transport.store import Store, read_value

_POLL_S = 0.05
_TOKEN = re.compile("[0-9a-f]{16}")


def has_agents(env: Mapping[str, str]) -> bool:
    """Whether torchrun has an agent on each of several hosts."""
    return "TORCHELASTIC_RUN_ID" in env and env.get("GROUP_WORLD_SIZE", "1") != "1"


def agree_on_start(store: Store, rank: int, size: int, seconds: float) -> str:
    """Return a name of this start, equal on all ranks and different from those of other starts.

    Rank 0 draws it, and gives it to the process that each rank has now: a process publishes a token
    of its own, and reads the name under that token. A `RendezvousError` names the ranks that are
    missing after ``seconds``.
    """
    own = secrets.token_hex(8)
    if rank == 0:
        _invite(store, own, size, seconds)
        return own
    store.set(f"present/{rank}", own)
    try:
        name = store.get(f"invited/{rank}/{own}", seconds)
        if not _TOKEN.fullmatch(name):
            raise TimeoutError("its answer is malformed")
    except TimeoutError as error:
        raise RendezvousError(
            f"rank {rank}: rank 0 did not give the name of this start within {seconds:g} s: "
            f"{error}; check that rank 0 runs the same script, and that all workers have the same "
            "WINGBEAT_JOB_KEY or none"
        ) from None
    store.set(f"accepted/{rank}/{name}", own)
    return name


def _invite(store: Store, name: str, size: int, seconds: float) -> None:
    """Give a start's name to the other ranks, until all have accepted it."""
    deadline, missing = time.monotonic() + seconds, list(range(1, size))
    invited: dict[int, str] = {}
    while missing:
        for rank in missing:
            token = read_value(store, f"present/{rank}")  # an earlier process's, until it starts
            if token is not None and token != invited.get(rank) and _TOKEN.fullmatch(token):
                invited[rank] = token
                store.set(f"invited/{rank}/{token}", name)
        missing = [rank for rank in missing if not store.has(f"accepted/{rank}/{name}")]
        if missing and time.monotonic() > deadline:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise RendezvousError(
                f"rank 0: rank {missing[0]}{more} did not start within {seconds:g} s, or runs "
                "another script; check the output of its host for the first error"
            )
        if missing:
            time.sleep(_POLL_S)
