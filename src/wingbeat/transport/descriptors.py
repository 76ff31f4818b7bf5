"""How many files and sockets this process may have open, and whether that is enough.

gloo and libzmq end the process when they get no file descriptor. So wingbeat counts before it opens
sockets, and refuses in one line what would not fit.
"""

from __future__ import annotations

import contextlib
import os
import resource

from wingbeat.errors import UsageError

DIRECTORY = "/dev/fd"
"""Lists the open descriptors of this process."""

GLOO_DEVICE = 4
"""Descriptors of a gloo device: the socket it listens with, its epoll and a pipe. One more for
each peer that is connected."""

_SPARE = 4
"""Descriptors left to others: a file that is read, a module that is imported."""


def raise_limit() -> None:
    """Raise the soft limit of open descriptors, RLIMIT_NOFILE, to the hard one."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):  # a hard limit that is above fs.nr_open
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def require(count: int, what: str) -> None:
    """Check that ``count`` more descriptors can be opened.

    ``what`` says what they are for, as the beginning of a sentence.

    Raises:
        UsageError: the limit is too low; names it and the number needed.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return
    try:
        used = len(os.listdir(DIRECTORY)) - 1  # the directory itself
    except OSError:
        used = limit  # none is left to read the directory with
    if used + count + _SPARE > limit:
        raise too_few(what, used + count + _SPARE)


def too_few(what: str, needed: int | None = None) -> UsageError:
    """Build the error for a process that has no descriptor left for ``what``."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    number = "more" if needed is None else f"at least {needed}"
    return UsageError(
        f"{what}: too few file descriptors: the limit is {limit} and {number} are needed; raise "
        "the hard limit, ulimit -Hn 1024 or more (LimitNOFILE= of systemd, --ulimit nofile= of "
        "docker)"
    )
