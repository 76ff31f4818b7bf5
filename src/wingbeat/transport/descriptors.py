"""Checks that enough file descriptors are available before sockets are opened.

gloo aborts the process when it gets no file descriptor. These checks raise a
`UsageError` instead.
"""

from __future__ import annotations

import contextlib
import os
import resource

from wingbeat.errors import UsageError

FD_DIRECTORY = "/dev/fd"
"""Lists the open descriptors of this process."""

GLOO_DEVICE_DESCRIPTORS = 4
"""Descriptors of a gloo device: listening socket, epoll, pipe. Each connected peer adds one."""

INTERFACE_DESCRIPTORS = 7
"""Descriptors of an interface besides its connections: two of epoll and an event of its thread, an
epoll and two listening sockets of its port, and one while a peer connects.
"""

DOORBELLS = 2
"""Descriptors of a connection in shared memory besides its socket."""

STORE_DESCRIPTORS = 9
"""Descriptors of torch's store in the process that serves it, besides connections."""

_RESERVED = 4
"""Descriptors kept free for other uses, such as files and imports."""


def of_world(ranks: int, on_host: int, interfaces: int, *, serves: bool) -> int:
    """Return the descriptors of a rank that connects to all others, and of the default group.

    ``on_host`` is the number of ranks of its host. ``serves`` is whether it is rank 0, which has a
    second connection of each rank, to the store.
    """
    return (
        GLOO_DEVICE_DESCRIPTORS
        + interfaces * INTERFACE_DESCRIPTORS
        + (1 + interfaces) * (ranks - 1)
        + interfaces * DOORBELLS * (on_host - 1)
        + 1
        + ranks * serves
    )


def of_store(ranks: int, *, serves: bool) -> int:
    """Return the descriptors of a rank's two connections to the store.

    ``serves`` is whether it is the process that serves it, with an end of those of all ranks.
    """
    return 2 + serves * (STORE_DESCRIPTORS + 2 * ranks)


def raise_limit() -> None:
    """Raise the soft limit of open descriptors, RLIMIT_NOFILE, to the hard one."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):  # the hard limit may exceed fs.nr_open
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def require(count: int, what: str) -> None:
    """Check that ``count`` more descriptors can be opened for ``what``; else a `UsageError`."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return
    try:
        used = len(os.listdir(FD_DIRECTORY)) - 1  # the directory itself
    except OSError:
        used = limit  # none is left to open the directory
    if used + count + _RESERVED > limit:
        raise too_few_error(what, used + count + _RESERVED)


def too_few_error(what: str, needed: int | None = None) -> UsageError:
    """Return the error of a process that has no descriptor left for ``what``."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    number = "more" if needed is None else f"at least {needed}"
    return UsageError(
        f"{what}: too few file descriptors: the limit is {limit} and {number} are needed; raise "
        "the hard limit, ulimit -Hn 1024 or more (LimitNOFILE= of systemd, --ulimit nofile= of "
        "docker)"
    )
