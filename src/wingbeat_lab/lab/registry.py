"""Find running labs from another terminal.

A running lab listens on an *abstract* Unix socket. Its name exists only in the kernel and ends
with the lab, so no stale file is ever left.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wingbeat.errors import LabError, unknown
from wingbeat_lab.lab.counters import LabStats

_PREFIX = "wingbeat-lab/"
_TIMEOUT = 10.0


@dataclass(frozen=True, slots=True)
class RunningLab:
    """A lab that answered: its name, its command, and its counters at that moment."""

    name: str
    command: tuple[str, ...]
    stats: LabStats


def listen() -> socket.socket:
    """Open the socket of a new lab; closing it removes the lab from the list."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0{_PREFIX}{os.getpid()}-{secrets.token_hex(2)}")
    listener.listen(8)
    return listener


def running() -> list[RunningLab]:
    """All labs of this user that answer, with their counters; oldest launcher first."""
    found = [_ask(name) for name in _names()]
    return [lab for lab in found if lab is not None]


def stats(name: str | None = None) -> LabStats:
    """Return the counters of the running lab ``name``, or of the only one.

    UsageError if there is no lab of that name, LabError if none or several are running.
    """
    return choose(running(), name).stats


def choose(labs: list[RunningLab], name: str | None) -> RunningLab:
    """Select one lab.

    UsageError if there is no lab of that name, LabError if none or several are running.
    """
    if name is not None:
        for lab in labs:
            if lab.name == name:
                return lab
        raise unknown("lab", name, [lab.name for lab in labs])
    if len(labs) == 1:
        return labs[0]
    if not labs:
        raise LabError("no lab is running; start one with: wingbeat lab run SPEC -- CMD")
    names = ", ".join(lab.name for lab in labs)
    raise LabError(f"{len(labs)} labs are running, say which: {names}")


def _names() -> list[str]:
    with contextlib.suppress(OSError):
        lines = Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace").splitlines()
        marks = (line.rpartition(f"@{_PREFIX}") for line in lines)
        # A connection shows the listener's name too, hence the set.
        names = {name.strip() for _, mark, name in marks if mark}
        return sorted(names, key=lambda n: int(n.partition("-")[0]) if n[:1].isdigit() else 0)
    return []


def _ask(name: str) -> RunningLab | None:
    """Read one lab's answer; None if it has ended or belongs to another user."""
    useless = contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError)
    with useless, socket.socket(socket.AF_UNIX) as client:
        client.settimeout(_TIMEOUT)
        client.connect(f"\0{_PREFIX}{name}")
        credentials = client.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
        )
        if struct.unpack("3i", credentials)[1] != os.getuid() != 0:
            return None
        with client.makefile("rb") as reply:
            answer: dict[str, Any] = json.loads(reply.read())
        command, stats = answer["command"], answer["stats"]
        return RunningLab(name, tuple(map(str, command)), LabStats.from_json(stats))
    return None
