"""Linux system calls that Python does not wrap, through the C library."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWNET = 0x40000000
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Move this thread into new namespaces; OSError if refused."""
    _check(_libc.unshare(flags), "unshare")


def setns(fd: int, flags: int) -> None:
    """Enter the namespace of an open file; OSError if refused."""
    _check(_libc.setns(fd, flags), "setns")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mount a file system, or bind a file or folder; OSError if refused."""
    kind_arg, data = (text.encode() if text else None for text in (kind, options))
    done = _libc.mount(source.encode(), target.encode(), kind_arg, ctypes.c_ulong(flags), data)
    _check(done, f"mount {target}")


def detach(target: str) -> None:
    """Unmount as soon as the mount is unused; OSError if refused."""
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"unmount {target}")


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel send ``signal`` to this process when its parent ends for any reason."""
    _libc.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(number), 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent has ended."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0)


def new_network() -> int:
    """Create a network namespace; return a file that keeps it alive until it is closed."""
    here = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        unshare(CLONE_NEWNET)
        try:
            return os.open("/proc/self/ns/net", os.O_RDONLY)
        finally:
            setns(here, CLONE_NEWNET)
    finally:
        os.close(here)


@contextlib.contextmanager
def inside(network: int) -> Iterator[None]:
    """Run the body in another network namespace (this thread only)."""
    here = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        setns(network, CLONE_NEWNET)
        try:
            yield
        finally:
            setns(here, CLONE_NEWNET)
    finally:
        os.close(here)
