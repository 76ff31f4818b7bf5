"""Where jobs of this user on this host can be looked at: one Unix socket each, in one folder.

The folder is always in ``/tmp``, as a job and whoever looks at it may have different values of
``XDG_RUNTIME_DIR`` or ``TMPDIR``, and the former is removed as its user logs out, while jobs go on.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

FOLDER = "WINGBEAT_RUNTIME_DIR"
"""Environment variable: another folder for them."""

_NAME = 40
"""Characters of a name: the path of a socket has about 100 in all."""

SUFFIX = ".sock"


class NoPlace(OSError):
    """The folder cannot be made, or is not this user's alone."""


def folder(env: Mapping[str, str] = os.environ) -> Path:
    """Return the folder, which need not exist."""
    return Path(env.get(FOLDER) or f"/tmp/wingbeat-{os.getuid()}")


def made(path: Path) -> Path:
    """Make the folder if need be, for this user alone.

    Raises:
        NoPlace: that is not possible, or somebody else may write there.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as err:
        raise NoPlace(f"{path}: {err.strerror}") from None
    check(path)
    return path


def check(path: Path) -> None:
    """Check that nobody else can have put anything into the folder, if there is one.

    Raises:
        NoPlace: somebody may, or it cannot be looked at.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    except OSError as err:
        raise NoPlace(f"{path}: {err.strerror}") from None
    # Anybody may have made something of that name in /tmp before.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise NoPlace(f"{path}: it is not a folder of this user alone (chmod 700)")


def job_name(argv0: str = "", env: Mapping[str, str] = os.environ) -> str:
    """Return the name of this process's job: its script's and a process's number.

    Under torchrun that is torchrun's, so that a job that is started again keeps its name.
    """
    script = Path(argv0 or (sys.argv[0] if sys.argv else "")).name.removesuffix(".py")
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", script).strip("-.")[:_NAME] or "job"
    pid = os.getppid() if "TORCHELASTIC_RUN_ID" in env else os.getpid()
    return f"{plain}-{pid}"


def sockets(path: Path) -> dict[str, Path]:
    """Return the sockets there by their job's name; none if there is no such folder."""
    try:
        found = sorted(each for each in path.iterdir() if each.suffix == SUFFIX)
    except OSError:
        return {}
    return {each.name.removesuffix(SUFFIX): each for each in found}
