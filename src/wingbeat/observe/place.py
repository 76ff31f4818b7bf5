"""The folder with one Unix socket per job of this user on this host.

It is always in ``/tmp``: a job and ``wingbeat top`` may have different values of ``TMPDIR`` or
``XDG_RUNTIME_DIR``, and the latter's folder is removed at logout while jobs continue.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

FOLDER = "WINGBEAT_RUNTIME_DIR"
"""Environment variable: another folder for the sockets."""

_NAME = 40
"""Maximum characters of a name; the path of a socket has about 100 in all."""

SUFFIX = ".sock"


class NoPlace(OSError):
    """The folder cannot be created, or other users have access to it."""


def folder(env: Mapping[str, str] = os.environ) -> Path:
    """Return the folder, which may not exist."""
    return Path(env.get(FOLDER) or f"/tmp/wingbeat-{os.getuid()}")


def made(path: Path) -> Path:
    """Create the folder for this user alone; raises NoPlace if other users have access."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as err:
        raise NoPlace(f"{path}: {err.strerror}") from None
    check(path)
    return path


def check(path: Path) -> None:
    """Raise NoPlace if the folder exists and other users have access, or it cannot be inspected."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    except OSError as err:
        raise NoPlace(f"{path}: {err.strerror}") from None
    # Another user may have created that name in /tmp before.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise NoPlace(f"{path}: it is not a folder of this user alone (chmod 700)")


def job_name(argv0: str = "", env: Mapping[str, str] = os.environ) -> str:
    """Return the name of this process's job: the script's name and a process id.

    Under torchrun it is torchrun's process id, so a restarted job keeps its name.
    """
    script = Path(argv0 or (sys.argv[0] if sys.argv else "")).name.removesuffix(".py")
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", script).strip("-.")[:_NAME] or "job"
    pid = os.getppid() if "TORCHELASTIC_RUN_ID" in env else os.getpid()
    return f"{plain}-{pid}"


def sockets(path: Path) -> dict[str, Path]:
    """Return the sockets in the folder by job name; empty if the folder does not exist."""
    try:
        found = sorted(each for each in path.iterdir() if each.suffix == SUFFIX)
    except OSError:
        return {}
    return {each.name.removesuffix(SUFFIX): each for each in found}
